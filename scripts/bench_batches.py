"""Measure tokens/s at several batch sizes, and what speculation with a small node budget still gains there.

    python scripts/bench_batches.py pystdlib-8l prompts.jsonl [--batches 1 8 --methods pld:4 logitspec:6 --new 96]

`pld:4` is the method pld with max_nodes=4. `autoregressive` is always measured. Decoding is greedy and at T=0.8 with
top-k 50. Batch sizes and methods take turns on groups of prompts, and each group fills every batch by continuous
batching. The output is all tokens / all time, and ratios on the same prompts with their 95 % bootstrap interval over
groups.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from spectrain.decoding import Drafter, Sampling, TargetModel, generate, load_target
from spectrain.measure.results import BASELINE
from spectrain.measure.statistics import decode_s, ratio_of_sums
from spectrain.methods.registry import build_method, method_config
from spectrain.stores.locations import bundled_folder
from spectrain.stores.prompts import conversation_ids, read_prompts

SAMPLINGS = {"greedy": Sampling(), "T=0.8": Sampling(temperature=0.8, top_k=50)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder, Hugging Face id or bundled name")
    parser.add_argument("prompts", type=Path, help=".jsonl")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--methods", nargs="+", default=["pld:3", "pld:5", "logitspec:4"], help="name:max_nodes")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=16, help="prompts")
    parser.add_argument("--new", type=int, default=96, help="new tokens, a prompt")
    options = parser.parse_args()
    target = load_target(bundled_folder(options.target) or options.target, device="cpu")
    drafters = {name: build(name, target) for name in [BASELINE, *options.methods]}
    questions = read_prompts(options.prompts, options.groups * options.group_size)
    prompts = [conversation_ids(target.tokenizer, q.turns[:1], []) for q in questions]
    groups = [prompts[i : i + options.group_size] for i in range(0, len(prompts), options.group_size)]
    cells = [(s, b, name) for s in SAMPLINGS for b in options.batches for name in drafters]
    totals: dict[tuple[str, int, str], list[tuple[int, float]]] = {cell: [] for cell in cells}
    for cell in cells:  # warm-up
        decode(target, drafters, cell, groups[0][:2], 8)
    for group in track(groups, "groups"):
        for cell in cells:
            totals[cell].append(decode(target, drafters, cell, group, options.new))
    Console().print(table_of(totals, options.batches[0]))


def build(name: str, target: TargetModel) -> Drafter:
    method, _, max_nodes = name.partition(":")
    return build_method(method_config(method, int(max_nodes) if max_nodes else None), target, {})


def decode(target, drafters, cell: tuple[str, int, str], prompts: list[list[int]], n_new: int) -> tuple[int, float]:
    """Tokens and seconds of one group."""
    setting, batch_size, name = cell
    found = generate(target, drafters[name], prompts, n_new, SAMPLINGS[setting], batch_size=batch_size)
    return sum(len(g.tokens) for g in found), sum(decode_s(g) for g in found)


def table_of(totals: dict[tuple[str, int, str], list[tuple[int, float]]], first_batch: int) -> Table:
    table = Table(title=f"tokens/s, and ratios to batch {first_batch} and to autoregressive decoding at the same batch")
    for head in ("sampling", "batch", "method", "tokens/s", f"/ batch {first_batch}", "/ autoregressive"):
        table.add_column(head, no_wrap=True)
    for (setting, batch_size, name), measured in totals.items():
        tokens, seconds = (sum(values) for values in zip(*measured, strict=True))
        alone = ratio(measured, totals[setting, first_batch, name]) if batch_size != first_batch else ""
        plain = ratio(measured, totals[setting, batch_size, BASELINE]) if name != BASELINE else ""
        table.add_row(
            setting, str(batch_size), name, f"{tokens / seconds:.0f}", alone, plain if name != BASELINE else ""
        )
    return table


def ratio(ours: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> str:
    """Of two rates on the same groups. Token counts differ only where rounding flips a tie."""
    ours_s = [seconds / tokens for tokens, seconds in ours]
    theirs_s = [seconds / tokens for tokens, seconds in theirs]
    estimate = ratio_of_sums(theirs_s, ours_s)
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


if __name__ == "__main__":
    main()
