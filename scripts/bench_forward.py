"""Compare one forward of the lean decoder with the modules of transformers, both behind cached tokens, on a CPU.

    python scripts/bench_forward.py pystdlib-8l [--dtype float32 --nodes 1,5,16 --context 256 --threads 2]

The two take turns of eight forwards. The output is the median of each, and the median over turns of their ratio with
its 95 % bootstrap interval. A step of a SPIRe drafter follows (two blocks, the whole vocabulary, untrained), in turns
with a forward of five nodes. With `--operations` also what takes the time: each kind of operation alone. With
`--prompts 100,900` prompts of so many tokens are read instead, in turns: in pieces, each one program; by torch with our
kernel for all products; and by torch alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product
from math import inf
from unittest import mock

import torch
from torch import Tensor

from spectrain.decoding import DraftTree, KVCache, TargetModel, lean, load_target, weights
from spectrain.decoding.forward import Forward
from spectrain.decoding.lean import shape_of
from spectrain.kernels.cpu.running import Table
from spectrain.measure.statistics import median
from spectrain.methods.spire import Spire
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.stores.locations import bundled_folder

FORWARDS = 8
OPERATIONS = (
    "products",
    "norms",
    "angles",
    "rotation",
    "attention",
    "its sum",
    "silu",
    "copies",
    "",
    "",
    "embedding",
    "argmax",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder, Hugging Face id or bundled name")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--nodes", default="1,5,16", help="new tokens of a forward, a chain")
    parser.add_argument("--context", type=int, default=256, help="cached tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--draft-vocab", type=int, help="measure draft steps over so few tokens, too")
    parser.add_argument("--prompts", help="measure the reading of prompts of so many tokens")
    parser.add_argument("--operations", action="store_true", help="say what takes the time")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = bundled_folder(options.target) or options.target
    if options.prompts:
        target = load_target(folder, options.dtype, "cpu", engine="lean")
        for n_tokens in map(int, options.prompts.split(",")):
            print(prompt_of(target, n_tokens, options.turns), flush=True)
        return
    engines = ("lean", "transformers")
    targets = [load_target(folder, options.dtype, "cpu", engine=engine) for engine in engines]
    print(
        f"{options.target}, {options.dtype}, {options.threads} threads: ms of a forward behind {options.context} tokens"
    )
    with torch.inference_mode():
        prompt = torch.randint(targets[0].vocab_size, (1, options.context), generator=torch.Generator().manual_seed(0))
        caches = [KVCache(1, n_tokens=2 * options.context) for _ in targets]
        for target, cache in zip(targets, caches, strict=True):
            target.prefill(prompt, [options.context], cache, range(1))
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
            forward = targets[0]._engine.forward_of(caches[0], 1, n_nodes, ())
            if options.operations and forward is not None:
                print("  " + ", ".join(f"{name} {ms:.3f}" for name, ms in by_operation(forward).items()), flush=True)
        vocabularies = [None, options.draft_vocab] if options.draft_vocab else [None]
        for draft_dtype, draft_vocab in product(("int8", "float32"), vocabularies):
            print(draft_step(targets[0], caches[0], prompt, draft_dtype, draft_vocab, options.turns), flush=True)


def prompt_of(target: TargetModel, n_tokens: int, n_turns: int) -> str:
    """Compare the ways to read a prompt."""
    prompt = torch.randint(target.vocab_size, (1, n_tokens), generator=torch.Generator().manual_seed(0))
    turns = []
    for _ in range(n_turns + 1):
        seconds = []
        for in_pieces, most in ((True, inf), (False, inf), (False, 0)):
            with (
                mock.patch.object(lean, "outruns_torch", lambda in_pieces=in_pieces: in_pieces),
                mock.patch.object(weights, "most_rows", lambda dtype, most=most: most),
                torch.inference_mode(),
            ):
                cache, began = target.new_cache(1, 256, n_tokens + 64), time.perf_counter()
                target.prefill(prompt, [n_tokens], cache, range(1))
                seconds.append(time.perf_counter() - began)
                target.keep_cache(cache)
        turns.append(seconds)
    ms = [1e3 * statistics.median(column) for column in zip(*turns[1:], strict=True)]
    kernel, alone = (median([taken[i] / taken[0] for taken in turns[1:]]) for i in (1, 2))
    others = f"kernel {ms[1]:.1f} ms, ratio {kernel}; torch {ms[2]:.1f} ms, ratio {alone}"
    return f"prompt of {n_tokens} tokens: in pieces {ms[0]:.1f} ms; {others}"


def by_operation(forward: Forward) -> dict[str, float]:
    """Return the ms of each kind of operation of a forward, run alone."""
    lines, taken = forward.lines, {}
    logits = torch.empty(len(forward.x), forward.n_vocabulary)  # those of the last forward are gone
    places = [place for place, _ in forward.logits_at]
    forward.point(places, 4, logits)
    forward.point(forward.argmax_at, 1, logits)
    forward.point(forward.best_at, 4, forward.tokens)
    for kind, name in enumerate(OPERATIONS):
        table = Table(lines[lines[:, 0] == kind], forward.n_threads, forward.own_bytes)
        seconds = []
        for _ in range(5 * FORWARDS if len(table.lines) else 0):
            began = time.perf_counter()
            table.run()
            seconds.append(time.perf_counter() - began)
        if seconds:
            taken[name] = 1e3 * statistics.median(seconds)
    return taken


def draft_step(
    target: TargetModel, cache: KVCache, prompt: Tensor, draft_dtype: str, draft_vocab: int | None, n_turns: int
) -> str:
    """Compare a draft step with a forward of five nodes."""
    layers = (target.n_layer - 2, target.n_layer - 1)
    config = SpireConfig(shape_of(target.model), layers, input="trained", draft_vocab=draft_vocab)
    method = Spire(SpireDrafter(config), draft_dtype=draft_dtype)
    target = target.with_capture(method.capture_layers)
    method.start(target, KVCache(1))
    method.state = method.finals[:1]
    tree, position = DraftTree.chain(prompt[:, 0], prompt[:, 1:5]), torch.tensor([prompt.shape[1]])
    pairs = []
    for _ in range(n_turns + 1):
        seconds = []
        for _ in range(4 * FORWARDS):
            began = time.perf_counter()
            method._step(prompt[:, 0], position)
            seconds.append(time.perf_counter() - began)
        pairs.append((statistics.median(seconds), forward_s(target, cache, tree)))
    step, forward = (1e3 * statistics.median(column) for column in zip(*pairs[1:], strict=True))
    share = median([step_s / forward_s for step_s, forward_s in pairs[1:]])
    tokens = f"{draft_vocab or target.vocab_size} tokens"
    return f"SPIRe draft step, {draft_dtype}, {tokens}: {step:.3f}, forward of 5 nodes {forward:.2f}, ratio {share}"


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
