"""Tables of stop rules for the terminal: SpecDec++'s Tables 2 and 3, the areas under fronts, the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rich.markup import escape
from rich.table import Table

HEADS_SHOWN = 10  # of the table for the terminal


def stopping_tables(results: Mapping) -> Iterator[Table | str]:
    """What `spectrain.tune method=specdecpp` prints, of its `results.json`."""
    yield best_table(results)
    yield area_table(results)
    yield difference_table(results)
    yield head_table(results)
    yield times_table(results)
    if results["oracle"] is not None:
        yield oracle_line(results["oracle"])


def best_table(results: Mapping) -> Table:
    """The fastest setting of each family (Table 3)."""
    table = _table(
        f"fastest setting of each family: rates of {results['texts']} texts, simulated; tokens/s behind prefill, "
        f"measured on {results['timed']}",
        *("family", "setting", "discard rate", "verif. rate", "tau", "tokens/s predicted", "measured", "speedup"),
        "/ fixed gamma",
    )
    for family, one in results["best"].items():
        rates = ["", "", "", ""]
        if "tau" in one:
            predicted = _interval(one["predicted_tokens_per_s"], one["predicted_tokens_per_s_ci95"], 0)
            rates = [f"{one['discard_rate']:.3f}", f"{one['verification_rate']:.3f}", f"{one['tau']:.2f}", predicted]
        measured = [_estimate(one[key], n) for key, n in _MEASURED]
        table.add_row(family, escape(one["name"]) if "tau" in one else "", *rates, *measured)
    return table


_MEASURED = (("measured_tokens_per_s", 0), ("speedup", 2), ("over_best_fixed_gamma", 2))


def area_table(results: Mapping) -> Table:
    """Mean discard rates along the fronts, over what all families reach."""
    low, high = results["areas"]["verification_rates"]
    if not low < high:
        return _table(f"no verification rate is reached by all families ({low:.3f} to {high:.3f}): no areas")
    table = _table(
        f"discard rate along the front, mean over verification rates {low:.3f} to {high:.3f} (area / {high - low:.3f})",
        *("family", "area", "in sample", "held out"),
    )
    for name, one in results["areas"]["families"].items():
        heights = _estimate(one["mean_discard_rate"], 3), _estimate(one["held_out_mean_discard_rate"], 3)
        table.add_row(name, _number(one["area"], 4), *heights)
    return table


def difference_table(results: Mapping) -> Table:
    """Who dominates whom, pair by pair, each over what both reach."""
    table = _table(
        "discard rate along the front of one less that of the other; below 0: the first is better",
        *("fronts", "verif. rates", "in sample", "held out", "on or below"),
    )
    for one in results["differences"]:
        table.add_row(f"{one['family']} - {one['minus']}", *_difference(one), f"{_percent(one['share_on_or_below'])}")
    return table


def _difference(one: Mapping) -> tuple[str, str, str]:
    low, high = one["verification_rates"]
    reach = f"{low:.3f}..{high:.3f}" if low < high else "none in common"
    return reach, _estimate(one["mean_discard_rate_difference"], 3), _estimate(one["held_out"], 3)


def head_table(results: Mapping) -> Table:
    """Each head at its fastest threshold, and its own front less that of fixed lengths; the best fronts only."""
    every = sorted(results["single_heads"], key=_held_out_front)
    shown = every[:HEADS_SHOWN]
    left = f"; {len(every) - len(shown)} more in results.json" if len(shown) < len(every) else ""
    table = _table(
        f"each head at its fastest threshold, and its front less that of fixed gamma{left}",
        *("head", "w_rej", "blocks", "judge", "h", "discard rate", "verif. rate", "tokens/s predicted"),
        "front, held out",
    )
    for one in shown:
        facts, best = results["heads"][one["head"]], one["best"]
        table.add_row(
            escape(one["head"]),
            *(f"{facts['w_rej']:g}", str(facts["n_blocks"]), one["judge"], f"{best['value']:g}"),
            *(f"{best['discard_rate']:.3f}", f"{best['verification_rate']:.3f}"),
            _interval(best["predicted_tokens_per_s"], best["predicted_tokens_per_s_ci95"], 0),
            _estimate(one["difference"]["held_out"], 3),
        )
    return table


def _held_out_front(one: Mapping) -> float:
    height = one["difference"]["held_out"]["value"]
    return math.inf if height is None or math.isnan(height) else height


def times_table(results: Mapping) -> Table:
    """Milliseconds of a forward (Table 2)."""
    times = results["times"]
    table = _table(
        "T = t_draft N_draft + t_target N_target, ms: one t_target, a t_draft a family "
        f"(R2 {', uncentred '.join(_r2(times))}), and each family by itself",
        *("family", "t_draft", "t_target", "by itself: t_draft", "t_target", "R2", "uncentred"),
    )
    target = _ms(times["target_s"], times["target_s_ci95"])
    for family, one in times["families"].items():
        alone = one["by_itself"]
        table.add_row(
            *(family, _ms(one["draft_s"], one["draft_s_ci95"]), target),
            *(_ms(alone["draft_s"]), _ms(alone["target_s"]), *_r2(alone)),
        )
    table.add_row("autoregressive", "", "", "", _ms(times["stand_alone"]["target_s"]), *_r2(times["stand_alone"]))
    return table


def oracle_line(oracle: Mapping) -> str:
    """Theorem 4.1 in words."""
    calls = sum(text["target_calls"] for text in oracle["texts"])
    tokens = sum(text["tokens"] for text in oracle["texts"])
    told = f"{calls} target calls for {tokens} tokens (verification rate {oracle['verification_rate']:.3f})"
    if oracle["longest_draft"] is None:
        in_s = sum(text["disagreements"] for text in oracle["texts"])
        told += f", |S| = {in_s}"
    equal = "as predicted, text by text" if oracle["equal"] else "NOT the calls that were predicted"
    return (
        f"oracle (Theorem 4.1): {told}\n"
        f"  predicted {_number(oracle['theorem_tokens_per_s']['value'], 0)} tokens/s, with a look at each next token "
        f"{_number(oracle['predicted_tokens_per_s']['value'], 0)}; measured on {oracle['timed']} texts: "
        f"{_estimate(oracle['measured_tokens_per_s'], 0)} tokens/s, {_estimate(oracle['speedup'], 2)}x\n"
        f"  measured: {oracle['measured_discarded']} tokens discarded; {equal}"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for i, column in enumerate(columns):
        left = i == 0 or column in ("setting", "judge")
        table.add_column(column, justify="left" if left else "right", no_wrap=left)
    return table


def _estimate(found: Mapping, digits: int) -> str:
    return _interval(found["value"], (found["low"], found["high"]), digits)


def _interval(value: float | None, interval: tuple[float | None, float | None], digits: int) -> str:
    """A value and its interval, "12 [11, 13]", of which either may be missing, and the interval may be none."""
    if None in interval or interval[0] == interval[1]:
        return _number(value, digits)
    return f"{_number(value, digits)} \\[{_number(interval[0], digits)}, {_number(interval[1], digits)}]"


def _ms(seconds: float | None, interval: tuple[float | None, float | None] = (None, None)) -> str:
    scaled = [None if one is None else 1e3 * one for one in (seconds, *interval)]
    return _interval(scaled[0], (scaled[1], scaled[2]), 2)


def _r2(fit: Mapping) -> tuple[str, str]:
    return _number(fit["r2"], 4), _number(fit["r2_uncentred"], 4)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
