"""Time forwards, prompts, draft chains and whole texts on a CPU or GPU, beside Hugging Face's own code.

    python scripts/bench_kernels.py smollm2 --out kernels.json
    python scripts/bench_kernels.py pystdlib-8l --nodes 1 5 16 --context 256 --threads 2
    python scripts/bench_kernels.py smollm2 --busy 2                # plain decoding, alone and beside busy processes
    python scripts/bench_kernels.py smollm2 --roofline              # steps against the bandwidth of a CPU's memory
    python scripts/bench_kernels.py smollm2 --gguf smollm2.gguf     # beside llama.cpp: pip install llama-cpp-python
    python scripts/bench_kernels.py random-1b --card                # Triton kernels and forwards against the bandwidth

Whatever is compared takes turns, so that a drifting machine hurts all alike. Each line is a median with its 95 %
bootstrap interval over turns. `ratio` is their time divided by ours, turn by turn: above 1 ours is faster. A draft
chain is that of an untrained SPIRe drafter of two blocks over the whole vocabulary. With --card, `limit` is the time in
which the card's memory gives the bytes that have to be read, and random-1b has the shape of Llama 3.2 1B. With
--roofline, `share` is the time in which a product with a matrix of 1 GiB reads the bytes that a step has to, divided by
the step's. A part is what its operations take one after the other; the rest is waiting between operations.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

from spectrain.decoding import Drafter, generate
from spectrain.kernels import Program
from spectrain.kernels.cpu.attention import attend, combine, rotate
from spectrain.kernels.cpu.operations import PRODUCT, kind_of
from spectrain.kernels.cpu.running import Table
from spectrain.kernels.cpu.tiles import split
from spectrain.measure.baselines import generate_with_transformers, own_model
from spectrain.measure.statistics import median
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.registry import build_method, method_config
from spectrain.methods.spire import Spire
from spectrain.models.packages import target_path
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.stores.environment import device_facts, provenance
from spectrain.stores.files import write_json
from spectrain.target import DraftTree, KVCache, TargetModel, load_target
from spectrain.target.lean import shape_of

WARM_UPS = 2  # turns
REPEATS = 8  # of what takes milliseconds, per turn
CHAIN_TOKENS = 4  # of a SPIRe draft
ROOF_BYTES = 2**30  # that are read to know the memory's bandwidth

Timed = Callable[[], float]  # returns seconds


def main() -> None:
    args = parsed()
    torch.set_num_threads(args.threads)
    if args.card:
        if not torch.cuda.is_available():
            sys.exit("--card needs an NVIDIA GPU, and there is none")
        target = card_target(args.target)
        results = provenance() | device_facts(target.device, target.dtype) | {"target": args.target, "rows": []}
        return report(results, [product_rows(target), attention_rows(target), forward_rows(target, args)], args.out)
    target = load_target(target_path(args.target), args.dtype, args.device)
    results = provenance() | device_facts(target.device, target.dtype) | {"target": args.target, "rows": []}
    if args.roofline:
        sections = [roofline_rows(target, args)]
    else:
        sections = [busy_rows(target, args)] if args.busy else [kernel_rows(target, args), text_rows(target, args)]
    report(results, sections, args.out)


def report(results: dict, sections: Iterable[Iterator[dict]], out: Path | None) -> None:
    for section in sections:
        for row in section:
            results["rows"].append(row)
            print(line_of(row), flush=True)
            if out is not None:
                write_json(out, results)


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
    parser.add_argument("--card", action="store_true", help="time the Triton kernels of a GPU, and forwards by them")
    parser.add_argument("--busy", type=int, default=0, help="processes beside plain decoding, which alone is timed")
    parser.add_argument("--roofline", action="store_true", help="time steps of a CPU against its memory's bandwidth")
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 4096], help="cached tokens of the roofline")
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


def roofline_rows(target: TargetModel, args: argparse.Namespace) -> Iterator[dict]:
    """Time steps and their parts beside a read of 1 GiB, by busy processes, threads, cached tokens and nodes."""
    matrix, vector = torch.ones(ROOF_BYTES // 4 // 4096, 4096), torch.ones(4096)
    weights = sum(weight.nbytes for weight in target.model.parameters())
    for n_busy, n_threads, context in itertools.product(range(args.busy + 1), sorted({1, args.threads}), args.contexts):
        torch.set_num_threads(n_threads)
        prompt = random_tokens(target, context)
        cache = filled(target, prompt)
        n_bytes = weights + 2 * sum(keys[0, :, :context].nbytes for keys in cache.keys)
        for n_nodes in args.nodes:
            tree = DraftTree.chain(prompt[:, 0], prompt[:, 1:n_nodes])
            with torch.inference_mode():
                kept = target.score(tree, cache)  # whose memory the parts write to
                runs = parts_of(target._engine.forward_of(cache, 1, n_nodes, (), tree.n_silent))
            runs = {"step": partial(target.score, tree, cache), "read": partial(torch.mv, matrix, vector), **runs}
            with busy_processes(n_busy):
                timed = {name: repeated(run, target, 1) for name, run in runs.items()}
                row = compared(f"{n_nodes} nodes after {context}, {n_threads} threads", timed, args.turns)
            del kept
            share = {name: one and n_bytes / ROOF_BYTES * one for name, one in row["ratio"]["read"].items()}
            row |= {"nodes": n_nodes, "context": context, "threads": n_threads, "busy": n_busy, "bytes": n_bytes}
            yield row | {"read_gb_per_s": ROOF_BYTES / row["ms"]["read"]["value"] / 1e6, "share": share}


def parts_of(forward: Program) -> dict[str, Callable[[], None]]:
    """Return what runs the operations of each part of a program: products, attention, and all others."""
    kinds = {kind_of(one): "attention" for one in (rotate, attend, combine)}
    kinds |= {PRODUCT: "products", kind_of(split): "products"}
    lines = {"products": [], "attention": [], "others": []}
    for line in forward.lines.tolist():
        lines[kinds.get(line[0], "others")].append(line)
    return {name: Table(own, forward.n_threads, forward.own_bytes).run for name, own in lines.items()}


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
    """Time all interleaved; return the median ms of each, and how many times as long the others take as the first."""
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
    digits = 4 if "limit_ms" in row else 2
    found = [f"{name} {one['value']:.{digits}f} ms" for name, one in row["ms"].items()]
    if "tokens" in row:
        found = [f"{name} {1e3 * row['tokens'] / one['value']:.1f} tokens/s" for name, one in row["ms"].items()]
    found += [
        f"ratio of {name} {one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
        for name, one in row["ratio"].items()
        if one["low"] is not None
    ]
    found += [f"share {row['share']['value']:.2f}"] if "share" in row else []
    found += [f"limit {row['limit_ms']:.4f} ms"] if "limit_ms" in row else []
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
    reading = target.with_capture(method.method.capture_layers)
    method.start(reading, KVCache(1))
    method.state = method.finals[:1]
    position = torch.tensor([prompt.shape[1]])

    def chain() -> None:
        for _ in range(CHAIN_TOKENS):
            method._next(prompt[:, 0], position)

    return repeated(chain, target)


def card_target(name: str) -> TargetModel:
    if name != "random-1b":
        return load_target(target_path(name), "bfloat16", "cuda")
    sizes = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    config = LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True)
    with torch.device("cuda"):
        return TargetModel(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False))


def limit_ms(n_bytes: float) -> float:
    """Return in how many ms the card's memory gives so many bytes."""
    from triton.testing import get_dram_gbps  # here: only where there is a GPU

    return 1e-6 * n_bytes / get_dram_gbps()


def on_card(what: str, runs: Mapping[str, Callable[[], object]], n_bytes: float, n_turns: int = 3) -> dict:
    """Time runs without what the L2 cache holds of the run before."""
    from triton.testing import do_bench  # here: only where there is a GPU

    timed = {name: lambda run=run: 1e-3 * do_bench(run, return_mode="median") for name, run in runs.items()}
    return compared(what, timed, n_turns) | {"limit_ms": limit_ms(n_bytes)}


def product_rows(target: TargetModel) -> Iterator[dict]:
    """Time the products of a block by each tile and by torch, with what stands around them, and the unembedding."""
    from spectrain.kernels.cuda import triton_kernels

    decoder = target._engine.decoder
    block, activation = decoder.blocks[0], decoder.shape.hidden_act
    norm = block.input_norm.weight, decoder.shape.rms_norm_eps
    for m in (1, 16):
        residual = torch.randn(m, decoder.shape.hidden_size, dtype=target.dtype, device=target.device)
        for name, options in {
            "qkv": (block.qkv.weight, None, norm),
            "output": (block.output.weight, None, None, None, residual),
            "gate_up": (block.gate_up.weight, None, norm, activation),
            "down": (block.down.weight, None, None, None, residual),
            "unembedding": (decoder.lm_head.weight, None),
        }.items():
            product, x = triton_kernels._Product(*options), residual.new_ones(m, options[0].shape[1])
            runs = {f"{t.outputs} x {t.inputs}": partial(product.tiled, x, t) for t in triton_kernels.TILES}
            runs |= {"torch": partial(product.plain, x)}
            yield on_card(f"{name} of {m}", runs, options[0].nbytes)


def attention_rows(target: TargetModel) -> Iterator[dict]:
    """Time what is not a product: one row, many rows, and many rows of which one is long."""
    from spectrain.kernels.cuda import triton_kernels

    decoder = target._engine.decoder
    shape, block, rope = decoder.shape, decoder.blocks[0], decoder.rope
    rope.move(target.device)
    for lengths in ([256], [256] * 32, [16_000, *[256] * 31]):
        size = len(lengths), shape.n_kv_head, max(lengths) + 16, shape.head_dim
        keys, values = (torch.randn(size, dtype=target.dtype, device=target.device) for _ in range(2))
        on_device = torch.tensor(lengths, device=target.device)
        for n_nodes in (1, 16):
            m = len(lengths) * n_nodes
            x = keys.new_ones(m, shape.hidden_size)
            joined, gates = block.qkv(x), keys.new_ones(m, 2 * shape.intermediate_size)
            slots = on_device[:, None] + torch.arange(n_nodes, device=target.device)
            seen = torch.ones(len(lengths), n_nodes, n_nodes, dtype=torch.bool, device=target.device).tril()
            rotate = partial(triton_kernels.rotate, joined, None, 1e-5, (rope.inv_freq, rope.scaling), slots, slots)
            queries = rotate(keys, values)
            runs = {
                "attend": partial(triton_kernels.attend, queries, keys, values, on_device, seen),
                "rotate": partial(rotate, keys, values),
                "add_norm": partial(triton_kernels.add_norm, x, x, block.input_norm.weight, 1e-5),
                "gate": partial(triton_kernels.gate, gates, shape.hidden_act),
            }
            n_bytes = 2 * sum(lengths) * size[1] * size[3] * keys.element_size()
            yield on_card(f"{len(lengths)} rows up to {max(lengths)} x {n_nodes}", runs, n_bytes)


def forward_rows(target: TargetModel, args: argparse.Namespace) -> Iterator[dict]:
    """Time whole forwards through CUDA graphs, with our own kernels and with torch's operations."""
    torchs = TargetModel(target.model, compile="none")
    n_bytes = sum(weight.nbytes for weight in target.model.parameters())
    for n_rows in (1, 32):
        prompt = random_tokens(target, args.context).expand(n_rows, -1).to(target.device)
        for n_nodes in args.nodes:
            tree = DraftTree.chain(prompt[:, 0], prompt[:, 1:n_nodes])
            timed = {}
            for name, one in (("kernels", target), ("torch", torchs)):
                cache = KVCache(n_rows, n_tokens=2 * args.context)
                one.prefill(prompt, [args.context] * n_rows, cache, range(n_rows))
                timed[name] = repeated(lambda o=one, c=cache, t=tree: o.score(t, c), target)
            row = compared(f"forward of {n_rows} x {n_nodes}", timed, args.turns)
            yield row | {"limit_ms": limit_ms(n_bytes)}


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
