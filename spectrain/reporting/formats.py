"""Numbers as readers see them in tables; what is missing, null or not finite is a dash."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

MISSING = "–"


def number(value: object) -> float | None:
    """The value where it is a finite number, else None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def whole(one: Mapping, key: str) -> int:
    """A count; 0 where it is missing."""
    return int(number(one.get(key)) or 0)


def count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def fixed(value: object, digits: int, unit: str = "") -> str:
    value = number(value)
    return MISSING if value is None else f"{value:,.{digits}f}{unit}"


def percent(value: object, digits: int = 1) -> str:
    value = number(value)
    return MISSING if value is None else f"{100 * value:.{digits}f} %"


def bounds_of(interval: Sequence[object] | None) -> tuple[float, float] | None:
    """Both ends of an interval, where it has two finite ones."""
    bounds = [number(bound) for bound in interval or ()]
    return (bounds[0], bounds[1]) if len(bounds) == 2 and None not in bounds else None


def with_half_width(one: Mapping, measure: str, digits: int, unit: str = "") -> str:
    """A measure and half the width of its interval, "2.50 ± 0.10"."""
    bounds = bounds_of(one.get(f"{measure}_ci95"))
    text = fixed(one.get(measure), digits, unit)
    if bounds is None or text == MISSING:
        return text
    return f"{text} ± {(bounds[1] - bounds[0]) / 2:.{digits}f}"


def estimate(one: Mapping | None, digits: int) -> str:
    """A value with its interval, "2.50 [2.40, 2.61]"; without where it has none."""
    one = one or {}
    text, bounds = fixed(one.get("value"), digits), bounds_of((one.get("low"), one.get("high")))
    if bounds is None or text == MISSING:
        return text
    return f"{text} [{fixed(bounds[0], digits)}, {fixed(bounds[1], digits)}]"


def size(value: object) -> str:
    """Bytes, in MiB or GiB."""
    value = number(value)
    if not value:
        return MISSING
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
