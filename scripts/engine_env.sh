#!/usr/bin/env bash
# Make an environment with vLLM for CPUs, of pinned packages, and print the path of its Python:
#     bash scripts/engine_env.sh [folder]
# A complete environment of the same pins and Python is kept; one that is not is made anew (2.5 GB, some 3
# minutes). Two calls at once make it once. spectrain itself is not in it; install it with `pip install --no-deps`.
set -euo pipefail
pins=$(dirname "$(realpath "$0")")/engine_env.txt
folder=$(realpath -m "${1:-${XDG_CACHE_HOME:-$HOME/.cache}/spectrain-tests/engine}")
python=$folder/bin/python
stamp="$(sha256sum < "$pins") $(python3 -V)"
mkdir -p "$(dirname "$folder")"
exec 9> "$folder.lock"
flock 9
if [ "$(cat "$folder/complete" 2> /dev/null)" != "$stamp" ] || ! "$python" -c '' 2> /dev/null; then
    if [ -e "$folder" ] && ! [ -e "$folder/complete" ] && ! rmdir "$folder" 2> /dev/null; then
        echo "$folder was not made by this script; give another folder" >&2
        exit 1
    fi
    rm -rf "$folder"
    mkdir "$folder"
    touch "$folder/complete"  # it is ours from here on
    python3 -m venv "$folder"
    # What is imported is compiled when it is first imported: that is a tenth of the files.
    "$python" -m pip install --quiet --disable-pip-version-check --retries=1 --timeout=60 --no-compile --no-deps -r "$pins" >&2
    echo "$stamp" > "$folder/complete"
fi
echo "$python"
