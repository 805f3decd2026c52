"""Measure datastores of several sizes: building the suffix array, looking up contexts, and drafting.

    python scripts/bench_retrieval.py pystdlib-8l [--millions 1 10 --batch 16]

The text is the Python sources of this environment (standard library and installed packages), tokenised with the
target's tokenizer, one document per file. Contexts to look up and texts to draft for come from files that are in no
store. Each suffix array is built in its own process, which reports the seconds and the peak of resident memory beyond
the tokens.

A lookup finds the longest suffix of up to 16 tokens and its ranges. A retrieval also builds the tree of its
continuations (M = 100). Drafting is `propose` and `observe` of `sssd` per row, in a batch of rows that follow their
texts, where correct drafts are accepted. No target runs. Sizes take turns, query by query. The output is medians with
95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from spectrain.measure.simulation import follow

from spectrain.decoding import Context, KVCache, Sampling, TargetModel, TargetOutput, Verified, load_target
from spectrain.measure.statistics import median
from spectrain.methods.sssd import Sssd, SssdOptions
from spectrain.retrieval.datastore import Datastore, Manifest, write_manifest, write_shard
from spectrain.retrieval.fusion import RetrievalOptions, Retriever
from spectrain.retrieval.suffix_array import build_suffix_array, longest_suffix
from spectrain.stores.locations import bundled_folder

QUERY_TOKENS = 16
HELD_OUT_EVERY = 20  # every so many files is in no store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder, Hugging Face id or bundled name; its tokenizer is used")
    parser.add_argument("--millions", nargs="+", type=float, default=[1, 3, 10], help="tokens of the stores")
    parser.add_argument("--queries", type=int, default=3000)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16], help="rows drafted together")
    parser.add_argument("--steps", type=int, default=150, help="drafting steps of each batch")
    parser.add_argument("--context", type=int, default=500, help="tokens of a drafting row's prompt")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build_once(np.load(options.build))
        return
    torch.set_num_threads(options.threads)
    target = load_target(bundled_folder(options.target) or options.target, device="cpu")
    sizes = [int(m * 1e6) for m in options.millions]
    documents, held_out = read_sources(target, max(sizes))
    with tempfile.TemporaryDirectory() as folder:
        stores = {n: build(Path(folder) / str(n), documents, n, target.vocab_size) for n in sizes}
        report_builds(stores)
        report_lookups(stores, held_out, options.queries)
        report_drafting(target, stores, held_out, options)


def read_sources(target: TargetModel, n_tokens: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the token ids of enough files for the largest store, and of those that are held out."""
    paths = sysconfig.get_paths()
    files = [f for root in (paths["stdlib"], paths["purelib"]) for f in sorted(Path(root).rglob("*.py"))]
    documents, held_out, total = [], [], 0
    for i, file in enumerate(dict.fromkeys(files)):
        if total >= n_tokens:
            break
        text = file.read_text(encoding="utf-8", errors="ignore")
        ids = np.array(target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
        if i % HELD_OUT_EVERY == 0:
            held_out.append(ids)
        else:
            documents.append(ids)
            total += len(ids) + 1
    if total < n_tokens:
        print(f"this environment's sources have {total / 1e6:.1f} M tokens only", file=sys.stderr)
    return documents, held_out


def build(folder: Path, documents: list[np.ndarray], n_tokens: int, vocab_size: int) -> Datastore:
    folder.mkdir()
    chosen, total = [], 0
    for document in documents:
        if total >= n_tokens:
            break
        chosen.append(document[: n_tokens - total])
        total += len(chosen[-1]) + 1
    shard = write_shard(folder, 0, chosen, vocab_size)
    write_manifest(folder, Manifest("", "", "", vocab_size, len(chosen), total - len(chosen), [shard]))
    return Datastore(folder)


def build_once(tokens: np.ndarray) -> None:
    """Print seconds and peak bytes per token of building a suffix array. Linux only: resets the peak of the process."""
    build_suffix_array(tokens[:1000])
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    started = time.perf_counter()
    build_suffix_array(tokens)
    print(time.perf_counter() - started, (status_bytes("VmHWM") - before) / len(tokens))


def status_bytes(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def report_builds(stores: dict[int, Datastore]) -> None:
    table = Table("tokens", "seconds", "ns per token", "peak bytes per token above the tokens", title="suffix array")
    for n_tokens, store in stores.items():
        command = [sys.executable, __file__, "x", "--build", str(store.folder / "tokens-00000.npy")]
        runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(3)]
        seconds, peak = (float(np.median([float(run[i]) for run in runs])) for i in (0, 1))
        table.add_row(f"{n_tokens / 1e6:g} M", f"{seconds:.2f}", f"{1e9 * seconds / n_tokens:.0f}", f"{peak:.1f}")
    Console().print(table)


def report_lookups(stores: dict[int, Datastore], held_out: list[np.ndarray], n_queries: int) -> None:
    text = np.concatenate(held_out)
    places = np.random.default_rng(0).integers(QUERY_TOKENS, len(text), size=n_queries)
    retrievers = {n: Retriever(s, RetrievalOptions(1, QUERY_TOKENS, 10, min_matches=20)) for n, s in stores.items()}
    ranges = np.zeros((1, 2), dtype=np.int64)
    lookup_us, retrieval_us = {n: [] for n in stores}, {n: [] for n in stores}
    for i, place in enumerate([*places[:20], *places]):
        query = text[place - QUERY_TOKENS : place].copy()
        for n_tokens, store in stores.items():
            started = time.perf_counter()
            longest_suffix(store.index, query, 1, QUERY_TOKENS, ranges)
            middle = time.perf_counter()
            retrievers[n_tokens].gather(query)
            ended = time.perf_counter()
            if i >= 20:  # the first ones compile, and map the files
                lookup_us[n_tokens].append(1e6 * (middle - started))
                retrieval_us[n_tokens].append(1e6 * (ended - middle))
    table = Table("tokens", "lookup, us", "lookup and continuations, us", title=f"median of {n_queries} queries")
    for n_tokens in stores:
        cells = (median(us[n_tokens], n_resamples=200) for us in (lookup_us, retrieval_us))
        table.add_row(f"{n_tokens / 1e6:g} M", *(f"{m.value:.1f} [{m.low:.1f}, {m.high:.1f}]" for m in cells))
    Console().print(table)


def report_drafting(target: TargetModel, stores, held_out: list[np.ndarray], options: argparse.Namespace) -> None:
    text = np.concatenate(held_out)
    table = Table("tokens", *(f"batch {b}" for b in options.batch), title="a drafting step of sssd, us per row")
    variants = {"": {}, " with last logits": {"last_logits": True}}
    for n_tokens, store in stores.items():
        for name, changes in variants.items():
            cells = []
            for batch_size in options.batch:
                batch = WalkingBatch(target, Sssd(store, SssdOptions(**changes)), text, batch_size, options)
                steps_us = [batch.step_us() / batch_size for _ in range(options.steps + 10)][10:]
                estimate = median(steps_us)
                cells.append(f"{estimate.value:.0f} [{estimate.low:.0f}, {estimate.high:.0f}]")
            table.add_row(f"{n_tokens / 1e6:g} M{name}", *cells)
    Console().print(table)


class WalkingBatch:
    """Rows whose texts are known; a step accepts correct drafts."""

    def __init__(self, target: TargetModel, method: Sssd, text: np.ndarray, n_rows: int, options: argparse.Namespace):
        self.method, self.n_context = method, options.context
        room = 20 * (options.steps + 10)
        starts = np.linspace(0, len(text) - options.context - room - 1, n_rows).astype(int)
        self.texts = [text[start : start + options.context + room].tolist() for start in starts]
        self.context = Context(Sampling(), "cpu", n_rows)
        self.logits = torch.randn(n_rows, target.vocab_size)
        generators = [torch.Generator() for _ in range(n_rows)]
        self.context.append([t[: options.context] for t in self.texts], room, generators)
        roots = torch.tensor([t[options.context] for t in self.texts])
        self.context.root(range(n_rows), roots, self.logits)
        method.start(target, KVCache(n_rows))
        method.prefill(self.context, TargetOutput(self.logits[:, None], None, None), range(n_rows))

    def step_us(self) -> float:
        context = self.context
        started = time.perf_counter()
        tree = self.method.propose(context)
        taken_s = time.perf_counter() - started
        coming = [text[n:] for text, n in zip(self.texts, context.n_tokens, strict=True)]
        paths = [follow(tree, row, text) for row, text in enumerate(coming)]
        emitted = [text[: len(path) + 1] for text, path in zip(coming, paths, strict=True)]
        accepted = torch.tensor([len(path) for path in paths])
        roots = torch.tensor([e[-1] for e in emitted])
        verified = Verified(torch.zeros(len(emitted), 1, dtype=torch.int64), accepted, roots)
        output = TargetOutput(self.logits[:, None], None, None)
        started = time.perf_counter()
        self.method.follow(context, tree, output, verified, self.logits, emitted)
        return 1e6 * (taken_s + time.perf_counter() - started)


if __name__ == "__main__":
    main()
