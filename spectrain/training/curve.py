"""The numbers that a run logged, over all its attempts, as if it had never been interrupted."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

Curve = dict[int, dict[str, float]]  # step -> metric -> value

BY_THE_CLOCK = ("train/tokens_per_s", "train/wait_share")  # differ between equal runs


def merged(attempts: Sequence[tuple[int, Path]]) -> Curve:
    """One curve of several attempts: each replaces what the ones before it logged from where it went on.

    Args:
        attempts: in their order; the steps that were done when it began, and its metrics.csv, which may be missing.
    """
    curve: Curve = {}
    for done, file in attempts:
        curve = {step: row for step, row in curve.items() if step < done}
        for step, row in read_csv(file).items():
            curve.setdefault(step, {}).update(row)
    return dict(sorted(curve.items()))


def read_csv(file: Path) -> Curve:
    """The rows of a metrics.csv by step; of two rows of a step (training, validation) one is made."""
    curve: Curve = {}
    if not file.is_file():
        return curve
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if None in row.values() or not row["step"]:  # a line that a kill cut short
                continue
            values = {name: float(value) for name, value in row.items() if value and name not in ("step", "epoch")}
            curve.setdefault(int(row["step"]), {}).update(values)
    return curve


def without_clock(curve: Curve) -> Curve:
    """The curve without what depends on the machine's speed: equal runs have equal ones."""
    return {step: {name: v for name, v in row.items() if name not in BY_THE_CLOCK} for step, row in curve.items()}
