"""Numbers and intervals as readers see them. What is missing, null or not finite is a dash."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

MISSING = "–"


def number(value: object) -> float | None:
    """The value where it is a finite number, else None."""
    try:
        found = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return None
    return found if math.isfinite(found) else None


def whole(one: Mapping, key: str) -> int:
    """A count; 0 where it is missing."""
    return int(number(one.get(key)) or 0)


def count(n: object, noun: str) -> str:
    """How many there are: "1,024 rows"; a dash for what is no number."""
    n = number(n)
    return f"{MISSING} {noun}s" if n is None else f"{n:,.0f} {noun}{'' if n == 1 else 's'}"


def compact(value: float) -> str:
    """A count of tokens or rows on an axis: 8192, 64K."""
    return f"{value / 1024:g}K" if value >= 16384 and value % 1024 == 0 else f"{value:g}"


def fixed(value: object, digits: int, sign: str = "") -> str:
    value = number(value)
    return MISSING if value is None else f"{value:{sign},.{digits}f}"


def percent(value: object, digits: int = 1) -> str:
    value = number(value)
    return MISSING if value is None else f"{100 * value:.{digits}f} %"


def size(value: object) -> str:
    """Bytes, in MiB or GiB."""
    value = number(value)
    if not value:
        return MISSING
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def bounds_of(interval: Sequence[object] | None) -> tuple[float, float] | None:
    """Both ends of an interval, where it has two finite ones."""
    bounds = [number(bound) for bound in interval or ()]
    return (bounds[0], bounds[1]) if len(bounds) == 2 and None not in bounds else None


def estimate_of(one: Mapping | None) -> tuple[float | None, tuple[float, float] | None]:
    """Value and bounds of an estimate as files hold it."""
    one = one or {}
    return number(one.get("value")), bounds_of((one.get("low"), one.get("high")))


def measured(one: Mapping, measure: str) -> Mapping:
    """A measure of results and its interval, as value, low and high, whichever way results keep them."""
    value = one.get(measure)
    low, high = bounds_of(one.get(f"{measure}_ci95")) or (None, None)
    return value if isinstance(value, Mapping) else {"value": value, "low": low, "high": high}


def interval(one: Mapping | None, digits: int, sign: str = "") -> str:
    """A value and its 95 % interval, "2.50 [2.40, 2.61]"; only the value where the interval is unknown.

    Args:
        one: value, low and high.
        digits: behind the point.
        sign: "+" writes it before positive values, too.
    """
    value, bounds = estimate_of(one)
    text = fixed(value, digits, sign)
    known = value is not None and bounds is not None
    return f"{text} [{fixed(bounds[0], digits, sign)}, {fixed(bounds[1], digits, sign)}]" if known else text


def plus_minus(one: Mapping | None, digits: int, sign: str = "") -> str:
    """A value and half the width of its 95 % interval, "2.50 ± 0.10"; arguments as of `interval`."""
    value, bounds = estimate_of(one)
    known = value is not None and bounds is not None
    return fixed(value, digits, sign) + (f" ± {(bounds[1] - bounds[0]) / 2:.{digits}f}" if known else "")
