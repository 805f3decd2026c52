"""Measure this machine for some minutes, and say which method to use for a target: `spectrain.bench` with `minutes=`.

    python -m spectrain.recommend target=smollm2
    python -m spectrain.recommend target=<folder or hub id> prompts=<file.jsonl> minutes=10

Only the defaults of some options are others than those of `spectrain.bench`.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("spectrain.recommend")

from spectrain.bench import main

__all__ = ["main"]
