#!/usr/bin/env bash
# The drafter that comes with spectrain for SmolLM2-135M-Instruct, from its prompts to the exported folder.
#
#   PROMPTS="gsm8k.jsonl p3.jsonl roleplay.jsonl" scripts/smollm2_drafter.sh
#
# PROMPTS are files of questions whose licences permit it; prompts about code are made by chat_prompts.py. On two cores
# it takes about two hours: half of it for the responses, an eighth for the activations, the rest for the training.
# Each command resumes where it was interrupted.
set -euo pipefail
PROMPTS=${PROMPTS?give the .jsonl files of questions}
RANKS=${RANKS-2}
WORK=${WORK-runs/smollm2}
PYTHON=${PYTHON-python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS-1}   # of each rank

mkdir -p "$WORK"
# shellcheck disable=SC2086  # several files
$PYTHON scripts/chat_prompts.py $PROMPTS --most-characters 600 --out "$WORK/prompts.jsonl"
half=$(($(wc -l < "$WORK/prompts.jsonl") / 2))
head -n "$half" "$WORK/prompts.jsonl" > "$WORK/sampled.jsonl"
tail -n +$((half + 1)) "$WORK/prompts.jsonl" > "$WORK/greedy.jsonl"

ranks() { torchrun --nproc-per-node "$RANKS" -m "$@"; }
ranks data_prep.responses prompts="$WORK/sampled.jsonl" limit="${SAMPLED-2800}" sampling=t1 target=smollm2 \
    max_new_tokens=192 batch_size=32 out="$WORK/own-sampled"
ranks data_prep.responses prompts="$WORK/greedy.jsonl" limit="${GREEDY-1300}" sampling=greedy target=smollm2 \
    max_new_tokens=192 batch_size=32 out="$WORK/own-greedy"
ranks data_prep.activations responses="$WORK/own-sampled:$WORK/own-greedy" target=smollm2 'layers=[27,28,29]' \
    out="$WORK/activations"
