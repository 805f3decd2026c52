"""Compare how much methods accept: differences of tau on the same questions, from finished benchmarks.

    python scripts/compare_methods.py runs/bench-a runs/bench-b --of sssd --with pld rest sssd_input
    python scripts/compare_methods.py runs/bench-a runs/bench-b     # speed and tau of all methods, as Markdown

The questions of all folders are pooled. If there are several folders, each is also shown by itself. tau is the number
of tokens produced per target forward pass. The interval of a difference is a 95 % bootstrap that draws questions, for
both methods together. A difference whose interval contains 0 is unresolved.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from spectrain.measure.results import QuestionRow, summarise
from spectrain.stores.typed import from_json

RESAMPLES = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of spectrain.bench")
    parser.add_argument("--of", help="the method")
    parser.add_argument("--with", nargs="+", dest="others", help="methods to compare it with")
    options = parser.parse_args()
    if options.of is None or options.others is None:
        print("\n".join(overview(options.runs)))
        return
    rows = {run: counts(run) for run in options.runs}
    pools = {run.name: [run] for run in rows} | ({"all": list(rows)} if len(rows) > 1 else {})
    table = Table(title=f"tau of {options.of}, and what it has more than others, in pairs")
    for head in ("questions of", "n", options.of, *options.others):
        table.add_column(head, no_wrap=True)
    for name, runs in pools.items():
        cells = [difference(rows, runs, options.of, other) for other in options.others]
        own = pairs(rows, runs, options.of, options.of)
        table.add_row(name, str(len(own)), f"{tau(own[:, 0].sum(0)):.3f}", *cells)
    Console(width=max(100, 48 + 26 * len(options.others))).print(table)


def overview(runs: Sequence[Path]) -> list[str]:
    """Return the lines of a Markdown table: each method's speed over plain decoding and its tau, by run and of all."""
    by_run = {
        run.name: [
            from_json(QuestionRow, row | {"question_id": f"{run.name}:{row['question_id']}"}) for row in lines_of(run)
        ]
        for run in runs
    }
    pools = by_run | ({"all": [row for rows in by_run.values() for row in rows]} if len(runs) > 1 else {})
    names = dict.fromkeys(row.method for rows in by_run.values() for row in rows)
    found = {pool: summarise(rows, dict.fromkeys(names, "method"), False, False) for pool, rows in pools.items()}
    heads = [f"{pool}: speed | tau" for pool in pools]
    lines = [f"| method | {' | '.join(heads)} |", "|---" * (1 + 2 * len(heads)) + "|"]
    for name in names:
        cells = [cell for pool in pools for cell in measured(found[pool][name])]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def measured(of_method: dict) -> tuple[str, str]:
    """Return the speedup with its interval, and tau."""
    if not of_method["questions"]:
        return "", ""
    interval, tau_ = of_method["speedup_ci95"], of_method["mean_accepted"]
    around = "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    return f"{of_method['speedup']:.2f}{around}", "" if tau_ is None else f"{tau_:.2f}"


def lines_of(run: Path) -> list[dict]:
    file = run / "questions.jsonl"
    if not file.is_file():
        raise SystemExit(f"error: {run} holds no questions.jsonl; give the folder of a benchmark")
    return [json.loads(line) for line in file.read_text().splitlines()]


def counts(run: Path) -> dict[tuple[str, str], tuple[int, int]]:
    """(question, method) -> tokens that steps emitted, and steps; questions without a step are left out."""
    found = {}
    for row in lines_of(run):
        if row["error"] is None and row["target_forwards"]:
            tokens = sum(map(len, row["replies"])) - row["turns"]
            found[row["question_id"], row["method"]] = tokens, row["target_forwards"]
    return found


def pairs(rows: dict, runs: Sequence[Path], one: str, other: str) -> np.ndarray:
    """[questions, 2, 2]: tokens and steps of both methods on the questions that both answered."""
    found = [
        (rows[run][question, one], rows[run][question, other])
        for run in runs
        for question, method in rows[run]
        if method == one and (question, other) in rows[run]
    ]
    return np.array(found, dtype=np.float64).reshape(-1, 2, 2)


def tau(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / sums[..., 1]


def difference(rows: dict, runs: Sequence[Path], one: str, other: str) -> str:
    both = pairs(rows, runs, one, other)
    if not len(both):
        return "not measured"
    value = np.diff(tau(both.sum(0))[::-1])[0]
    picks = np.random.default_rng(0).integers(len(both), size=(RESAMPLES, len(both)))
    drawn = tau(both[picks].sum(axis=1))
    low, high = np.quantile(drawn[:, 0] - drawn[:, 1], [0.025, 0.975])
    if math.isnan(low):
        return f"{value:+.3f}"
    return f"{value:+.3f} \\[{low:+.3f}, {high:+.3f}]"


if __name__ == "__main__":
    main()
