"""The logged numbers of a training by step: the metrics.csv of each attempt, joined to one curve."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from spectrain.errors import UserError

Curve = dict[int, dict[str, float]]  # step -> metric -> value


def merged(attempts: Sequence[tuple[int, Path]]) -> Curve:
    """One curve of several attempts: each replaces what earlier ones logged from the step where it was resumed.

    `attempts` has for each the steps that were done when it began, and its metrics.csv, which may be missing.
    """
    curve: Curve = {}
    for done, file in attempts:
        curve = {step: row for step, row in curve.items() if step < done}
        for step, row in read_csv(file).items():
            curve.setdefault(step, {}).update(row)
    return dict(sorted(curve.items()))


def read_csv(file: Path) -> Curve:
    """The rows of a metrics.csv by step; two rows of one step (training, validation) become one."""
    curve: Curve = {}
    if not file.is_file():
        return curve
    try:
        with file.open(newline="") as lines:
            # A kill may have cut the last line, in the middle of a number too.
            for row in csv.DictReader(line for line in lines if line.endswith("\n")):
                values = {name: float(value) for name, value in row.items() if value and name not in ("step", "epoch")}
                curve.setdefault(int(row["step"]), {}).update(values)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}); restore it, or remove it and do without its numbers") from error
    return curve
