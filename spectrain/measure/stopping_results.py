"""From counts and seconds of stop rules to the results of `spectrain.tune method=specdecpp`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from spectrain.measure.pareto import Comparison, Table, compare, front
from spectrain.measure.results import BASELINE
from spectrain.measure.statistics import Estimate, ratio_of_sums
from spectrain.measure.stopping_times import (
    TimedRow,
    Times,
    fit_times,
    measured_rate,
    predicted_rate,
    speedup,
)

FIXED, HEAD = "fixed gamma", "specdecpp"
ORACLE = "oracle"
HEAD_RESAMPLES = 500  # bootstraps of each head's own front


@dataclass
class Found:
    """What was simulated, entry i of each list belonging to setting i, and what was timed, once it is."""

    names: Sequence[str]
    families: Sequence[str]
    heads: Sequence[str | None]
    judges: Sequence[str | None]
    values: Sequence[float]
    table: Table
    regression: Sequence[TimedRow] = ()
    times: Times | None = None
    best: dict[str, int] = field(default_factory=dict)  # family -> setting
    measured: Sequence[TimedRow] = ()

    def members(self, family: str) -> list[int]:
        return [i for i, own in enumerate(self.families) if own == family]

    def groups(self) -> dict[str, list[int]]:
        """The families, fixed lengths first."""
        return {family: self.members(family) for family in dict.fromkeys(self.families)}

    def judged(self) -> dict[str, list[int]]:
        """All heads that judge in each way."""
        judges = [judge for judge in dict.fromkeys(self.judges) if judge]
        return {f"{HEAD}, {judge}": [i for i, own in enumerate(self.judges) if own == judge] for judge in judges}

    def single_heads(self) -> dict[tuple[str, str], list[int]]:
        """The settings of each head and way to judge."""
        found: dict[tuple[str, str], list[int]] = {}
        for i, key in enumerate(zip(self.heads, self.judges, strict=True)):
            if key[0] is not None:
                found.setdefault(key, []).append(i)
        return found

    def promising_head(self) -> str:
        """The head whose least sum of both rates is lowest: the head to be timed before times are known."""
        rates = self.table.rates(np.ones(len(self.table.tokens)))
        own = [i for i, head in enumerate(self.heads) if head is not None]
        return self.heads[min(own, key=lambda i: rates[0, i] + rates[1, i])]

    def predicted(self, i: int) -> Estimate:
        counts = (self.table.tokens, self.table.draft_forwards[i], self.table.target_calls[i])
        return predicted_rate(self.times, self.families[i], *counts)


def best_settings(found: Found) -> dict[str, int]:
    """The setting of each family that is predicted to be the fastest."""
    totals = found.table.draft_forwards.sum(1), found.table.target_calls.sum(1)
    seconds = [found.times.seconds(family, totals[0][i], totals[1][i]) for i, family in enumerate(found.families)]
    seconds = [s if math.isfinite(s) else math.inf for s in seconds]
    return {family: min(found.members(family), key=seconds.__getitem__) for family in dict.fromkeys(found.families)}


def stopping_results(facts: Mapping, found: Found, oracle: Mapping | None) -> dict:
    """The content of `results.json`."""
    rates = found.table.rates(np.ones(len(found.table.tokens)))
    return _plain(
        {
            **facts,
            "definitions": {
                "verification_rate": "forwards of the target a token; prefill and the first token are left out",
                "discard_rate": "drafted tokens that were not emitted, a token",
                "tokens_per_s": "tokens behind the first / seconds behind prefill",
                "predicted": "T = target_s N_target + draft_s[family] N_draft, from the regression on timed prompts",
            },
            "settings": [_setting(found, rates, i) for i in range(len(found.names))],
            "fronts": {
                name: [found.names[own[i]] for i in front(rates[:2, own])]
                for name, own in {**found.groups(), **found.judged()}.items()
            },
            "areas": _areas(compare(found.table, found.groups())),
            "differences": _differences(found),
            "single_heads": _heads(found, rates),
            "times": _times(found),
            "best": _best(found, rates),
            "oracle": None if oracle is None else _oracle(found, oracle),
        }
    )


def _setting(found: Found, rates: np.ndarray, i: int) -> dict:
    predicted = found.predicted(i)
    return {
        "name": found.names[i],
        "family": found.families[i],
        "head": found.heads[i],
        "judge": found.judges[i],
        "value": found.values[i],
        "verification_rate": rates[0, i],
        "discard_rate": rates[1, i],
        "draft_forwards_rate": rates[2, i],
        "tau": 1 / rates[0, i],
        "predicted_tokens_per_s": predicted.value,
        "predicted_tokens_per_s_ci95": [predicted.low, predicted.high],
    }


def _areas(found: Comparison) -> dict:
    families = {}
    for name, area in found.areas.items():
        families[name] = {
            "area": area,
            "mean_discard_rate": asdict(found.heights[name]),
            "held_out_mean_discard_rate": asdict(found.held_out[name]),
        }
    return {"verification_rates": [found.low, found.high], "families": families}


def _differences(found: Found) -> list[dict]:
    """The heads' front less that of each other family, and the two ways to judge, over what both of a pair reach."""
    groups = found.groups()
    pairs = [({HEAD: groups[HEAD]}, {name: own}) for name, own in groups.items() if name != HEAD]
    if len(judged := list(found.judged().items())) == 2:
        pairs.append((dict(judged[:1]), dict(judged[1:])))
    return [_difference(found.table, one, other) for one, other in pairs]


def _difference(
    table: Table, one: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]], n_resamples: int = 2000
) -> dict:
    """Mean discard rate along the front of `one` less that of `other`, a family each."""
    ((name, own),), ((less, theirs),) = one.items(), other.items()
    numbers = {less: range(len(theirs)), name: range(len(theirs), len(theirs) + len(own))}
    compared = compare(table.only([*theirs, *own]), numbers, n_resamples)
    return {
        "family": name,
        "minus": less,
        "verification_rates": [compared.low, compared.high],
        "areas": [compared.areas[name], compared.areas[less]],
        "mean_discard_rate_difference": asdict(compared.differences[name]),
        "held_out": asdict(compared.held_out_differences[name]),
        "share_on_or_below": compared.share_below[name],
    }


def _heads(found: Found, rates: np.ndarray) -> list[dict]:
    """Each head and way to judge: its fastest threshold (Table 3), and its front against that of fixed lengths."""
    rows, fixed = [], {FIXED: found.members(FIXED)}
    for (head, judge), own in found.single_heads().items():
        best = max(own, key=lambda i: _finite(found.predicted(i).value))
        difference = _difference(found.table, {f"{head}, {judge}": own}, fixed, HEAD_RESAMPLES)
        rows.append({"head": head, "judge": judge, "best": _setting(found, rates, best), "difference": difference})
    return rows


def _times(found: Found) -> dict:
    """Table 2: the joint regression, one a family, and the target by itself."""
    times, intervals = found.times, found.times.intervals()
    alone = [row for row in found.regression if row.family == BASELINE]
    families = {}
    for family in times.draft_s:
        own = fit_times([row for row in found.regression if row.family == family])
        families[family] = {
            "draft_s": times.draft_s[family],
            "draft_s_ci95": intervals[family],
            "by_itself": {
                "target_s": own.target_s,
                "draft_s": own.draft_s[family],
                "r2": own.r2,
                "r2_uncentred": own.r2_uncentred,
            },
        }
    stand_alone = fit_times(alone)
    return {
        "target_s": times.target_s,
        "target_s_ci95": intervals["target"],
        "families": families,
        "r2": times.r2,
        "r2_uncentred": times.r2_uncentred,
        "stand_alone": {
            "target_s": stand_alone.target_s,
            "r2": stand_alone.r2,
            "r2_uncentred": stand_alone.r2_uncentred,
        },
        "rows": [asdict(row) for row in found.regression],
    }


def _best(found: Found, rates: np.ndarray) -> dict:
    """Table 3: the fastest setting of each family, predicted and measured."""
    rows = {name: [row for row in found.measured if row.setting == name] for name in _measured_names(found)}
    plain, fixed = rows[BASELINE], rows[found.names[found.best[FIXED]]]
    best = {}
    for family, name in {BASELINE: BASELINE, **{f: found.names[i] for f, i in found.best.items()}}.items():
        own = rows[name]
        one = {"name": name} if family == BASELINE else _setting(found, rates, found.best[family])
        calls = [row.target_calls for row in own]
        best[family] = one | {
            "tau_measured": asdict(ratio_of_sums([row.tokens for row in own], calls)),
            "measured_tokens_per_s": asdict(measured_rate(own)),
            "speedup": asdict(speedup(own, plain)),
            "over_best_fixed_gamma": asdict(speedup(own, fixed)),
        }
    return best


def _measured_names(found: Found) -> list[str]:
    return list(dict.fromkeys(row.setting for row in found.measured))


def _oracle(found: Found, oracle: Mapping) -> dict:
    """Theorem 4.1 in numbers, beside what the loop measured."""
    texts = oracle["texts"]
    tokens = np.array([text["tokens"] for text in texts])
    calls = np.array([text["target_calls"] for text in texts])
    drafts = np.array([text["draft_forwards"] for text in texts])
    timed = [text for text in texts if text["measured_target_calls"] is not None]
    own = [row for row in found.measured if row.setting == ORACLE]
    plain = [row for row in found.measured if row.setting == BASELINE]
    return {
        **oracle,
        "verification_rate": calls.sum() / tokens.sum(),
        "discard_rate": 0.0,
        # The theorem's drafter makes no forward but for tokens that are accepted; the loop looks at the next one, too.
        "theorem_tokens_per_s": asdict(predicted_rate(found.times, FIXED, tokens, tokens - calls, calls)),
        "predicted_tokens_per_s": asdict(predicted_rate(found.times, FIXED, tokens, drafts, calls)),
        "measured_tokens_per_s": asdict(measured_rate(own)),
        "speedup": asdict(speedup(own, plain)),
        "timed": len(timed),
        "equal": all(text["measured_target_calls"] == text["target_calls"] for text in timed),
        "measured_discarded": sum(text["measured_discarded"] for text in timed),
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _plain(value: object) -> object:
    """As JSON has it: no numpy numbers, no nan."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
