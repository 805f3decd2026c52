#!/usr/bin/env bash
# The bench of record: every method on a chat model, over prompt sets, samplings, batch sizes and dtypes, on one page.
#
#   PROMPTS="gsm8k.jsonl humaneval.jsonl" scripts/record.sh
#   PROMPTS=... BATCHES=1 SAMPLINGS=greedy DTYPES=float32 LLAMA_CPP= scripts/record.sh     # a part, which a later call completes
#
# Each cell is a run of spectrain.bench, and finished cells are not measured again, so the same command goes on after an
# interruption. float32 comes first: only there are greedy texts compared with those of plain decoding. Baselines of other
# engines run at batch 1; llama.cpp only greedy, and only if its packages are installed (docs/measuring.md).
set -euo pipefail
TARGET=${TARGET-smollm2}
PROMPTS=${PROMPTS?give the .jsonl files, such as PROMPTS=\"gsm8k.jsonl humaneval.jsonl\"}
METHODS=${METHODS-all}             # those without a drafter or datastore are left out
DRAFTER=${DRAFTER-null}            # folder, or [folders]; null: the newest ones below checkpoints/ that fit
DATASTORE=${DATASTORE-null}
HEAD=${HEAD-null}
QUESTIONS=${QUESTIONS-12}          # of each file
TOKENS=${TOKENS-128}               # new ones of an answer, at most
SAMPLINGS=${SAMPLINGS-greedy t08 t1 sssd}
BATCHES=${BATCHES-1 4 16}
DTYPES=${DTYPES-float32 bfloat16}
LLAMA_CPP=${LLAMA_CPP-llama_cpp,llama_cpp_lookup}
HUGGING_FACE=${HUGGING_FACE-hf_generate,hf_prompt_lookup}   # hf_assisted needs a vanilla drafter
OUT=${OUT-runs/record}
PYTHON=${PYTHON-python}

for dtype in $DTYPES; do
    for batch in $BATCHES; do
        for sampling in $SAMPLINGS; do
            for file in $PROMPTS; do
                peers=
                if [ "$batch" = 1 ]; then
                    peers=$HUGGING_FACE
                    if [ "$sampling" = greedy ] && [ -n "$LLAMA_CPP" ]; then
                        peers=${peers:+$peers,}$LLAMA_CPP
                    fi
                fi
                set_name=$(basename "$file" .jsonl)
                $PYTHON -m spectrain.bench "methods=$METHODS" "peers=[$peers]" target="$TARGET" target.dtype="$dtype" \
                    prompts="$file" limit="$QUESTIONS" max_new_tokens="$TOKENS" sampling="$sampling" batch_size="$batch" \
                    drafter="$DRAFTER" datastore="$DATASTORE" head="$HEAD" \
                    out="$OUT/$dtype-batch-$batch-$sampling-$set_name"
            done
        done
    done
done
$PYTHON -m spectrain.report runs="$OUT" out="$OUT/report.html" title="Bench of record: $TARGET" fresh=true
