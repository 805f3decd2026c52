#!/usr/bin/env bash
# The ablations of SPIRe (paper section 4.2: Table 1 and Figure 5), each drafter trained on the same tokens.
#
#   scripts/spire_ablations.sh                                              # the bundled target and the standard library
#   TARGET=<folder> CORPUS=<file.jsonl> DOCUMENTS=8000 scripts/spire_ablations.sh
#   ABLATIONS=none,hard VANILLA= ROWS= scripts/spire_ablations.sh           # a part, beside another process with the rest
#
# The target reads the corpus once (data_prep.activations); then a multirun trains every variant on the same rows, the last
# weights are exported whatever their tau, and compare_drafters.py decodes the same held-out contexts with all of them and
# MagicDec. The same command goes on after an interruption, with what is left.
set -euo pipefail
TARGET=${TARGET-pystdlib-8l}       # folder, hub id or bundled name
CORPUS=${CORPUS-null}              # file or folder of text; null: the standard library
DOCUMENTS=${DOCUMENTS-400}         # of it, at least STEPS x 4 x 1,024 tokens for a single pass
STEPS=${STEPS-380}                 # optimizer steps of 4 x 1,024 tokens
OUT=${OUT-runs/spire_ablations}
ABLATIONS=${ABLATIONS-none,random_init,distill,hard,no_feedback,no_target_activations,dense_kv}
VANILLA=${VANILLA-vanilla}         # empty: no vanilla drafter
ROWS=${ROWS-256}                   # held-out contexts of each length; empty: no comparison
ALSO=${ALSO-}                      # a further file of text that no training saw
PYTHON=${PYTHON-python}

data=(target.path="$TARGET" corpus.path="$CORPUS" corpus.max_documents="$DOCUMENTS")
equal=(max_steps="$STEPS" select.every=0 tau.contexts=8 tau.context_tokens=[256] tau.timed_contexts=2)
mkdir -p "$OUT"

if [ ! -f "$OUT/activations/manifest.json" ]; then
    $PYTHON -m data_prep.activations "${data[@]}" out="$OUT/activations"
fi
if [ -n "$ABLATIONS" ]; then
    $PYTHON -m spectrain.train -m +exp=spire previous_state=false "+ablation=$ABLATIONS" data=offline data.path="$OUT/activations" "${data[@]}" "${equal[@]}" \
        run_dir="$OUT/runs/\${hydra:runtime.choices.ablation}" out="$OUT/drafters/\${hydra:runtime.choices.ablation}"
fi
if [ -n "$VANILLA" ]; then
    $PYTHON -m spectrain.train -m +exp=vanilla "${data[@]}" "${equal[@]}" run_dir="$OUT/runs/vanilla" out="$OUT/drafters/vanilla"
fi
if [ -n "$ROWS" ]; then
    drafters=(spire="$OUT/drafters/none")
    for folder in "$OUT"/drafters/*/; do
        name=$(basename "$folder")
        [ "$name" = none ] || drafters+=("$name=$OUT/drafters/$name")
    done
    more=()
    [ "$CORPUS" = null ] || more+=(--corpus "$CORPUS")
    [ -z "$ALSO" ] || more+=(--also "$ALSO")
    $PYTHON "$(dirname "$0")/compare_drafters.py" "${drafters[@]}" magicdec --target "$TARGET" --context-tokens 256 512 960 \
        --rows "$ROWS" --skip 0 --out "$OUT/comparison" "${more[@]}"
fi
