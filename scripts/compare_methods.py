"""Compare how much methods accept: differences of tau on the same questions, from finished benchmarks.

    python scripts/compare_methods.py runs/bench-a runs/bench-b --of sssd --with pld rest sssd_input

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

RESAMPLES = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of spectrain.bench")
    parser.add_argument("--of", required=True, help="the method")
    parser.add_argument("--with", nargs="+", required=True, dest="others", help="methods to compare it with")
    options = parser.parse_args()
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


def counts(run: Path) -> dict[tuple[str, str], tuple[int, int]]:
    """(question, method) -> tokens that steps emitted, and steps; questions without a step are left out."""
    file = run / "questions.jsonl"
    if not file.is_file():
        raise SystemExit(f"error: {run} holds no questions.jsonl; give the folder of a benchmark")
    found = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
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
