"""Time forwards, prompts, draft chains and whole texts on a CPU or GPU, beside Hugging Face's own code.

    python scripts/bench_kernels.py smollm2 --out kernels.json
    python scripts/bench_kernels.py pystdlib-8l --nodes 1 5 16 --context 256 --threads 2
    python scripts/bench_kernels.py smollm2 --busy 2                # plain decoding, alone and beside busy processes
    python scripts/bench_kernels.py smollm2 --gguf smollm2.gguf     # beside llama.cpp: pip install llama-cpp-python

Whatever is compared takes turns, so that a drifting machine hurts all alike. Each line is a median with its 95 %
bootstrap interval over turns. `ratio` is their time divided by ours, turn by turn: above 1 ours is faster. A draft
chain is that of an untrained SPIRe drafter of two blocks over the whole vocabulary.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

from spectrain.decoding import Drafter, DraftTree, KVCache, TargetModel, generate, load_target
from spectrain.decoding.lean import shape_of
from spectrain.measure.baselines import generate_with_transformers, own_model
from spectrain.measure.statistics import median
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.registry import build_method, method_config
from spectrain.methods.spire import Spire
from spectrain.models.packages import target_path
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.stores.environment import device_facts, provenance
from spectrain.stores.files import write_json

WARM_UPS = 2  # turns
REPEATS = 8  # of what takes milliseconds, per turn
CHAIN_TOKENS = 4  # of a SPIRe draft

Timed = Callable[[], float]  # returns seconds


def main() -> None:
    args = parsed()
    torch.set_num_threads(args.threads)
    target = load_target(target_path(args.target), args.dtype, args.device)
    results = provenance() | device_facts(target.device, target.dtype) | {"target": args.target, "rows": []}
    sections = [busy_rows(target, args)] if args.busy else [kernel_rows(target, args), text_rows(target, args)]
    for section in sections:
        for row in section:
            results["rows"].append(row)
            print(line_of(row), flush=True)
            if args.out is not None:
                write_json(args.out, results)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder, Hugging Face id or bundled name")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 5, 16], help="new tokens of a forward, a chain")
    parser.add_argument("--prompts", nargs="+", type=int, default=[100, 900], help="tokens of prompts that are read")
    parser.add_argument("--context", type=int, default=256, help="cached tokens")
    parser.add_argument("--new", type=int, default=96, help="new tokens of a whole text")
    parser.add_argument("--methods", nargs="*", default=["auto"], help="whose whole texts are timed, too")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--busy", type=int, default=0, help="processes beside plain decoding, which alone is timed")
    parser.add_argument("--gguf", type=Path, help="the target's weights for llama.cpp")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    return parser.parse_args()


def kernel_rows(target: TargetModel, args: argparse.Namespace) -> Iterator[dict]:
    """Time forwards of a chain behind a context, a SPIRe draft chain, and the reading of prompts."""
    theirs = TargetModel(target.model, target.tokenizer, engine="transformers")
    prompt, caches = random_tokens(target, args.context), {}
    for name, one in (("ours", target), ("transformers", theirs)):
        caches[name] = one, filled(one, prompt)
    for n_nodes in args.nodes:
        tree = DraftTree.chain(prompt[:, 0], prompt[:, 1:n_nodes]) if n_nodes > 1 else DraftTree.root_only(prompt[:, 0])
        timed = {name: repeated(lambda o=o, c=c, t=tree: o.score(t, c), target) for name, (o, c) in caches.items()}
        yield compared(f"forward of {n_nodes}", timed, args.turns)
    yield compared(f"SPIRe chain of {CHAIN_TOKENS}", {"ours": spire_chain(target, prompt)}, args.turns)
    for n_tokens in args.prompts:
        read = random_tokens(target, n_tokens)
        timed = {
            "ours": repeated(lambda r=read: filled(target, r), target, 1),
            "transformers": repeated(lambda r=read: filled(theirs, r), target, 1),
        }
        yield compared(f"prompt of {n_tokens}", timed, args.turns)


def text_rows(target: TargetModel, args: argparse.Namespace) -> Iterator[dict]:
    """Time whole greedy texts: plain decoding and methods beside Hugging Face's `generate` and llama.cpp."""
    prompt, model = random_tokens(target, args.context).tolist(), own_model(target)
    drafters = {name: build_method(method_config(name), target) for name in args.methods}

    def transformers_s() -> float:
        found = generate_with_transformers(target, model, prompt, args.new, stop_token_ids=())
        return found[0].elapsed_s

    timed = {"ours": text_s(target, Autoregressive(), prompt, args.new), "transformers": transformers_s}
    timed |= {name: text_s(target, drafter, prompt, args.new) for name, drafter in drafters.items()}
    if args.gguf is not None:
        timed["llama.cpp"] = llama_cpp(args.gguf, prompt[0], args.new, args.threads)
    yield compared(f"text of {args.new} tokens", timed, args.turns) | {"tokens": args.new}


def busy_rows(target: TargetModel, args: argparse.Namespace) -> Iterator[dict]:
    """Time plain decoding alone and beside 1, 2, .. busy processes."""
    prompt = random_tokens(target, args.context).tolist()
    decode = text_s(target, Autoregressive(), prompt, args.new)
    for n_busy in range(args.busy + 1):
        with busy_processes(n_busy):
            yield compared(f"text beside {n_busy} busy", {"ours": decode}, args.turns) | {"tokens": args.new}


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep so many processes computing meanwhile."""
    processes = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    if processes:
        time.sleep(1.0)  # until they have started
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin() -> None:
    while True:
        pass


def compared(what: str, timed: Mapping[str, Timed], n_turns: int) -> dict:
    """Time each in turns; return the median ms of each, and how many times as long the others take as the first."""
    turns = []
    with torch.inference_mode():
        for number in range(n_turns + WARM_UPS):
            names = list(timed)
            first = number % len(names)  # another begins each time
            seconds = {name: timed[name]() for name in names[first:] + names[:first]}
            turns += [seconds] if number >= WARM_UPS else []
    own, *others = timed
    row = {"what": what, "ms": {name: median([1e3 * turn[name] for turn in turns]).as_json() for name in timed}}
    return row | {"ratio": {name: median([turn[name] / turn[own] for turn in turns]).as_json() for name in others}}


def line_of(row: Mapping) -> str:
    found = [f"{name} {one['value']:.2f} ms" for name, one in row["ms"].items()]
    if "tokens" in row:
        found = [f"{name} {1e3 * row['tokens'] / one['value']:.1f} tokens/s" for name, one in row["ms"].items()]
    found += [
        f"ratio of {name} {one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
        for name, one in row["ratio"].items()
        if one["low"] is not None
    ]
    return f"{row['what']}: {', '.join(found)}"


def repeated(run: Callable[[], object], target: TargetModel, repeats: int = REPEATS) -> Timed:
    """Return what times a run by the mean of several, with a wait for the device at the end."""

    def seconds() -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / repeats

    return seconds


def random_tokens(target: TargetModel, count: int) -> Tensor:
    return torch.randint(target.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))


def filled(target: TargetModel, prompt: Tensor) -> KVCache:
    """Read a prompt into a new cache."""
    cache = KVCache(1, n_tokens=2 * prompt.shape[1])
    target.prefill(prompt.to(target.device), [prompt.shape[1]], cache, range(1))
    return cache


def spire_chain(target: TargetModel, prompt: Tensor) -> Timed:
    """Return what times the draft steps of an untrained drafter."""
    config = SpireConfig(shape_of(target.model), (target.n_layer - 2, target.n_layer - 1), input="trained")
    method = Spire(SpireDrafter(config), draft_dtype="auto")
    reading = target.with_capture(method.capture_layers)
    method.start(reading, KVCache(1))
    method.state = method.finals[:1]
    position = torch.tensor([prompt.shape[1]])

    def chain() -> None:
        for _ in range(CHAIN_TOKENS):
            method._step(prompt[:, 0], position)

    return repeated(chain, target)


def text_s(target: TargetModel, drafter: Drafter, prompt: list[list[int]], n_new: int) -> Timed:
    return repeated(lambda: generate(target, drafter, prompt, n_new, stop_token_ids=()), target, 1)


def llama_cpp(file: Path, prompt: list[int], n_new: int, n_threads: int) -> Timed:
    """Return what times a greedy text of llama.cpp, through llama-cpp-python."""
    from llama_cpp import Llama  # here: nothing else needs it

    options = {"n_threads": n_threads, "n_threads_batch": n_threads, "verbose": False}
    model = Llama(str(file), n_ctx=len(prompt) + n_new + 1, **options)

    def write() -> None:
        model.reset()
        for count, _ in enumerate(model.generate(prompt, temp=0.0), start=1):
            if count == n_new:
                return

    def seconds() -> float:
        began = time.perf_counter()
        write()
        return time.perf_counter() - began

    return seconds


if __name__ == "__main__":
    main()
