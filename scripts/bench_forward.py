"""Compare one forward of the lean decoder with the modules of transformers, both behind 256 cached tokens, on a CPU.

    python scripts/bench_forward.py pystdlib-8l [--dtype float32 --nodes 1,5,16 --threads 2 --turns 12]

The two take turns of eight forwards. The output is the median of each, and the median over turns of their ratio with
its 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from spectrain.decoding import DraftTree, KVCache, TargetModel, load_target
from spectrain.measure.statistics import median
from spectrain.stores.locations import bundled_folder

CONTEXT_TOKENS, FORWARDS = 256, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder, Hugging Face id or bundled name")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--nodes", default="1,5,16", help="new tokens of a forward, a chain")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = bundled_folder(options.target) or options.target
    engines = ("lean", "transformers")
    targets = [load_target(folder, options.dtype, "cpu", engine=engine) for engine in engines]
    print(
        f"{options.target}, {options.dtype}, {options.threads} threads: ms of a forward behind {CONTEXT_TOKENS} tokens"
    )
    with torch.inference_mode():
        prompt = torch.randint(targets[0].vocab_size, (1, CONTEXT_TOKENS), generator=torch.Generator().manual_seed(0))
        caches = [KVCache(1, n_tokens=2 * CONTEXT_TOKENS) for _ in targets]
        for target, cache in zip(targets, caches, strict=True):
            target.prefill(prompt, [CONTEXT_TOKENS], cache, range(1))
        for n_nodes in map(int, options.nodes.split(",")):
            tree = (
                DraftTree.chain(prompt[:, 0], prompt[:, 1:n_nodes])
                if n_nodes > 1
                else DraftTree.root_only(prompt[:, 0])
            )
            turns = [
                [forward_s(*one, tree) for one in zip(targets, caches, strict=True)] for _ in range(options.turns + 1)
            ]
            ours, theirs = (1e3 * statistics.median(column) for column in zip(*turns[1:], strict=True))
            ratio = median([theirs_s / ours_s for ours_s, theirs_s in turns[1:]])
            print(f"{n_nodes} nodes: lean {ours:.2f}, transformers {theirs:.2f}, ratio {ratio}", flush=True)


def forward_s(target: TargetModel, cache: KVCache, tree: DraftTree) -> float:
    """Return the median seconds of a forward, of FORWARDS."""
    taken = []
    for _ in range(FORWARDS):
        began = time.perf_counter()
        target.score(tree, cache)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
