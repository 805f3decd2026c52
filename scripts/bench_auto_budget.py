"""Compare max_nodes=auto with fixed node budgets: tokens/s of each, side by side.

    python scripts/bench_auto_budget.py <target> prompts.jsonl [--methods logitspec --fixed 2 4 8 16 32 --batches 1 8]

This needs the measurements of `python -m spectrain.tune budget=true` in ./checkpoints. Budgets take turns on groups of
prompts, and a different budget begins each time. The output is all tokens / all time, and auto's ratio to each fixed
budget on the same groups, with its 95 % bootstrap interval over groups. The row to look at is the fastest fixed budget.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from spectrain.decoding import Drafter, Sampling, TargetModel, generate, load_target
from spectrain.decoding.errors import UserError
from spectrain.measure.statistics import Estimate, decode_s, ratio_of_sums
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.registry import AUTO, build_method, method_config
from spectrain.stores.locations import bundled_folder
from spectrain.stores.prompts import conversation_ids, read_prompts

SAMPLINGS = {"greedy": Sampling(), "t08": Sampling(temperature=0.8, top_k=50), "t1": Sampling(temperature=1.0)}

Measured = list[tuple[int, float]]  # tokens and seconds of each group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder, Hugging Face id or bundled name")
    parser.add_argument("prompts", type=Path, help=".jsonl")
    parser.add_argument("--methods", nargs="+", default=["logitspec"])
    parser.add_argument("--drafter", help="folder of the datastore or drafter that a method needs")
    parser.add_argument("--fixed", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64], help="node budgets")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--sampling", choices=SAMPLINGS, default="greedy")
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--new", type=int, default=64, help="new tokens, a prompt")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    target = load_target(bundled_folder(options.target) or options.target, device=options.device)
    sampling = SAMPLINGS[options.sampling]
    questions = read_prompts(options.prompts, None)
    prompts = [conversation_ids(target.tokenizer, q.turns[:1], []) for q in questions]
    for method in options.methods:
        artifacts = {method_config(method).get("_artifact_"): options.drafter} if options.drafter else {}
        drafters = build(method, options.fixed, target, artifacts, sampling)
        for batch_size in options.batches:
            # At batch 1 a group has four prompts, else a batch and a half, so that rows leave and join.
            size = 4 if batch_size == 1 else batch_size * 3 // 2
            groups = [prompts[i * size : (i + 1) * size] for i in range(options.groups)]
            groups = [group for group in groups if len(group) == size]
            found = measure(target, drafters, groups, options.new, sampling, batch_size)
            Console().print(table_of(f"{method}, batch {batch_size}, {options.sampling}", drafters, found, batch_size))


def build(
    method: str, fixed: list[int], target: TargetModel, artifacts: Mapping[str, str], sampling: Sampling
) -> dict[str, Drafter]:
    """The method under every budget that has room for it, `auto` first; and plain decoding."""
    drafters = {AUTO: build_method(method_config(method, AUTO), target, artifacts, sampling)}
    for nodes in fixed:
        try:
            drafters[str(nodes)] = build_method(method_config(method, nodes), target, artifacts, sampling)
        except UserError as error:
            Console(stderr=True).print(f"{method} with {nodes} nodes is left out: {error}")
    return drafters | {"autoregressive": Autoregressive()}


def measure(target, drafters: dict[str, Drafter], groups, n_new: int, sampling: Sampling, batch_size: int):
    """Tokens and seconds of each group under each budget."""
    found: dict[str, Measured] = {name: [] for name in drafters}
    names = list(drafters)
    for name in names:  # warm-up
        generate(target, drafters[name], groups[0], 8, sampling, batch_size=batch_size)
    for turn, group in enumerate(track(groups, "groups", console=Console(stderr=True))):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            rows = generate(target, drafters[name], group, n_new, sampling, batch_size=batch_size)
            found[name].append((sum(len(g.tokens) for g in rows), sum(decode_s(g) for g in rows)))
    return found


def table_of(title: str, drafters: dict[str, Drafter], found: dict[str, Measured], batch_size: int) -> Table:
    table = Table(title=title)
    for head in ("nodes", "tokens/s", "auto / this"):
        table.add_column(head, justify="right", no_wrap=True)
    answers = drafters[AUTO].budget._known.items()  # of a smaller batch too: rows leave before others join
    chosen = sorted({nodes for (rows, _), nodes in answers if rows <= batch_size})
    for name, measured in found.items():
        tokens, seconds = map(sum, zip(*measured, strict=True))
        label = f"auto ({', '.join(map(str, chosen))})" if name == AUTO else name
        table.add_row(label, f"{tokens / seconds:.0f}", "" if name == AUTO else str(ratio(found[AUTO], measured)))
    return table


def ratio(ours: Measured, theirs: Measured) -> Estimate:
    """Of two rates on the same groups. Token counts differ only where rounding flips a tie."""
    return ratio_of_sums([s / n for n, s in theirs], [s / n for n, s in ours])


if __name__ == "__main__":
    main()
