#!/usr/bin/env bash
# A drafter for SmolLM2-135M-Instruct as the one that comes with spectrain, from its prompts to the exported folder, and
# a datastore of the answers.
#
#   PROMPTS="gsm8k.jsonl p3.jsonl roleplay.jsonl" scripts/smollm2_drafter.sh
#
# PROMPTS are files of questions whose licences permit it; prompts about code are made by chat_prompts.py. On two cores
# it takes about two hours: half of it for the responses, an eighth for the activations, the rest for the training.
# After an interruption the same command goes on. It needs pip install -e '.[gguf]'.
#
# INIT=<folder> trains an exported drafter further, on the answers to other prompts than before:
#
#   INIT=checkpoints/smollm2-135m-spire STEPS=940 LR=1.5e-3 WORK=runs/more OUT=checkpoints/more STORE=checkpoints/more-answers \
#       PROMPTS=... scripts/smollm2_drafter.sh
set -euo pipefail
PROMPTS=${PROMPTS:?give the .jsonl files of questions}
RANKS=${RANKS-2}
WORK=${WORK-runs/smollm2}
PYTHON=${PYTHON-python}
INIT=${INIT-pruned}
from=(init="$INIT")
[ "$INIT" = pruned ] && from+=(draft_vocab=24576)   # an exported drafter has its tokens
export OMP_NUM_THREADS=${OMP_NUM_THREADS-1}   # of each rank

mkdir -p "$WORK"
# shellcheck disable=SC2086  # several files
$PYTHON scripts/chat_prompts.py $PROMPTS --most-characters 600 --out "$WORK/prompts.jsonl"
half=$(($(wc -l < "$WORK/prompts.jsonl") / 2))
head -n "$half" "$WORK/prompts.jsonl" > "$WORK/sampled.jsonl"
tail -n +$((half + 1)) "$WORK/prompts.jsonl" > "$WORK/greedy.jsonl"

store() {   # name, command, options: unless it is finished
    [ -e "$WORK/$1/manifest.json" ] ||
        $PYTHON -m torch.distributed.run --nproc-per-node "$RANKS" -m "$2" target=smollm2 out="$WORK/$1" "${@:3}"
}
store own-sampled data_prep.responses prompts="$WORK/sampled.jsonl" limit="${SAMPLED-2800}" sampling=t1 \
    max_new_tokens=192 batch_size=32
store own-greedy data_prep.responses prompts="$WORK/greedy.jsonl" limit="${GREEDY-1300}" sampling=greedy \
    max_new_tokens=192 batch_size=32
[ -e "${STORE-checkpoints/smollm2-own-answers}/manifest.json" ] ||
    $PYTHON -m data_prep.datastore corpus=responses:"$WORK/own-sampled:$WORK/own-greedy" target=smollm2 keep=null \
        perplexity_filter=false out="${STORE-checkpoints/smollm2-own-answers}"
store activations data_prep.activations responses="$WORK/own-sampled:$WORK/own-greedy" 'layers=[27,28,29]'
$PYTHON -m spectrain.train +exp=spire target=smollm2 data=offline data.path="$WORK/activations" data.batch_size=8 \
    data.val_rows=96 trainer=ddp trainer.accelerator=cpu trainer.devices="$RANKS" "${from[@]}" max_steps="${STEPS-1950}" \
    optimizer.lr="${LR-3e-3}" optimizer.warmup_steps=60 trainer.val_check_interval="${VALIDATE-650}" select.every=0 tau.contexts=32 \
    'tau.context_tokens=[96,160]' run_dir="$WORK/spire" out="${OUT-checkpoints/smollm2-135m-spire}"
