"""From the counts and seconds of stop rules to the results of `spectrain.tune method=specdecpp`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spectrain.measure.pareto import compare, front
from spectrain.measure.statistics import ratio_of_sums
from spectrain.measure.stop_simulation import FIXED, HEAD, Counts, Setting
from spectrain.measure.stop_times import TimedRow, Times, fit_times, measured_rate, speedup
from spectrain.methods.registry import BASELINE
from spectrain.stores.folder import strict

ORACLE = "oracle"
HEAD_RESAMPLES = 500  # bootstraps of each head's own front
DEFINITIONS = {
    "verification_rate": "target forwards per token; prefill and the first token are left out",
    "discard_rate": "drafted tokens that were not emitted, per token",
    "tokens_per_s": "tokens after the first / seconds after prefill",
    "predicted": "T = target_s N_target + draft_s[family] N_draft, from the regression on timed prompts",
}


def grouped(settings: Sequence[Setting], by: str) -> dict[str, list[int]]:
    """The numbers of the settings by one of their attributes, without those that have none."""
    found: dict[str, list[int]] = {}
    for i, setting in enumerate(settings):
        if (key := getattr(setting, by)) is not None:
            found.setdefault(key, []).append(i)
    return found


@dataclass(frozen=True)
class StopMeasurements:
    """What was simulated and timed. Entry i of the counts belongs to setting i."""

    settings: Sequence[Setting]
    counts: Counts
    regression: Sequence[TimedRow]
    times: Times
    best: dict[str, int]  # family -> its fastest setting, as predicted
    timed: Sequence[TimedRow]  # of the best settings, of plain decoding and the oracle
    oracle: Mapping | None  # the longest draft, and what each text takes; None when sampled

    def results(self) -> dict:
        """The content of `results.json`, without what was asked for."""
        rates = self.counts.rates[:2]
        fronts = {name: [own[i] for i in front(rates[:, own])] for name, own in (self.families | self.judged).items()}
        found = compare(self.counts, self.families)
        families = {
            name: {"area": area, "mean_discard_rate": found.heights[name]}
            | {"held_out_mean_discard_rate": found.held_out[name]}
            for name, area in found.fronts.areas.items()
        }
        # The heads' front less that of each other family, and the two ways to judge.
        pairs = [({HEAD: self.families[HEAD]}, {name: own}) for name, own in self.families.items() if name != HEAD]
        if len(judged := [{name: own} for name, own in self.judged.items()]) == 2:
            pairs.append(tuple(judged))
        return strict(
            {
                "definitions": DEFINITIONS,
                "settings": self.rows,
                "fronts": {name: [str(self.settings[i]) for i in own] for name, own in fronts.items()},
                "areas": {"verification_rates": [found.fronts.low, found.fronts.high], "families": families},
                "differences": [self.difference(*pair) for pair in pairs],
                "single_heads": self.single_heads(),
                "times": self.regression_results(),
                "best": self.best_results(),
                "oracle": None if self.oracle is None else self.oracle_results(),
            }
        )

    @cached_property
    def families(self) -> dict[str, list[int]]:
        """The settings of each family, fixed lengths first."""
        return grouped(self.settings, "family")

    @cached_property
    def judged(self) -> dict[str, list[int]]:
        """All heads that judge in each way."""
        return {f"{HEAD}, {judge}": own for judge, own in grouped(self.settings, "judge").items()}

    @cached_property
    def rows(self) -> list[dict]:
        """What is known of each setting."""
        found = []
        for i, (setting, rates) in enumerate(zip(self.settings, self.counts.rates.T.tolist(), strict=True)):
            counts = self.counts.tokens, self.counts.draft_forwards[i], self.counts.target_calls[i]
            predicted = self.times.predicted_rate(setting.family, *counts)
            found.append(
                {
                    "name": str(setting),
                    "family": setting.family,
                    "head": setting.head,
                    "judge": setting.judge,
                    "value": setting.value,
                    **dict(zip(("verification_rate", "discard_rate", "draft_forwards_rate"), rates, strict=True)),
                    "tau": 1 / rates[0],
                    "predicted_tokens_per_s": predicted.value,
                    "predicted_tokens_per_s_ci95": [predicted.low, predicted.high],
                }
            )
        return found

    def difference(
        self, one: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]], n_resamples: int = 2000
    ) -> dict:
        """The mean discard rate along the front of `one` family less that of `other`, over what both reach."""
        ((name, _),), ((less, _),) = one.items(), other.items()
        compared = compare(self.counts, {**other, **one}, n_resamples)
        return {
            "family": name,
            "minus": less,
            "verification_rates": [compared.fronts.low, compared.fronts.high],
            "areas": [compared.fronts.areas[name], compared.fronts.areas[less]],
            "mean_discard_rate_difference": compared.differences[name],
            "held_out": compared.held_out_differences[name],
            "share_on_or_below": compared.fronts.shares_below()[name],
        }

    def single_heads(self) -> list[dict]:
        """Each head and way to judge: its fastest threshold (Table 3), and its front against that of fixed lengths."""

        def rate(i: int) -> float:
            value = self.rows[i]["predicted_tokens_per_s"]
            return value if math.isfinite(value) else -math.inf

        found, fixed = [], {FIXED: self.families[FIXED]}
        for head, numbers in grouped(self.settings, "head").items():
            for judge in dict.fromkeys(self.settings[i].judge for i in numbers):
                own = [i for i in numbers if self.settings[i].judge == judge]
                difference = self.difference({f"{head}, {judge}": own}, fixed, HEAD_RESAMPLES)
                best = self.rows[max(own, key=rate)]
                found.append({"head": head, "judge": judge, "best": best, "difference": difference})
        return found

    def regression_results(self) -> dict:
        """Table 2: the joint regression, one regression per family, and the target by itself."""

        def fit(family: str) -> dict:
            own = fit_times([row for row in self.regression if row.family == family])
            draft = {} if family == BASELINE else {"draft_s": own.draft_s[family]}
            return {"target_s": own.target_s, **draft, "r2": own.r2, "r2_uncentred": own.r2_uncentred}

        times, intervals = self.times, self.times.intervals()
        return {
            "target_s": times.target_s,
            "target_s_ci95": intervals["target"],
            "families": {
                family: {"draft_s": seconds, "draft_s_ci95": intervals[family], "by_itself": fit(family)}
                for family, seconds in times.draft_s.items()
            },
            "r2": times.r2,
            "r2_uncentred": times.r2_uncentred,
            "stand_alone": fit(BASELINE),
            "rows": self.regression,
        }

    def timed_rows(self, name: str) -> list[TimedRow]:
        return [row for row in self.timed if row.setting == name]

    def best_results(self) -> dict:
        """Table 3: the fastest setting of each family, predicted and measured."""
        fixed = self.timed_rows(str(self.settings[self.best[FIXED]]))
        described = {BASELINE: {"name": BASELINE}, **{family: self.rows[i] for family, i in self.best.items()}}
        found = {}
        for family, one in described.items():
            own = self.timed_rows(one["name"])
            found[family] = one | {
                "tau_measured": ratio_of_sums([row.tokens for row in own], [row.target_calls for row in own]),
                "measured_tokens_per_s": measured_rate(own),
                "speedup": speedup(own, self.timed_rows(BASELINE)),
                "over_best_fixed_gamma": speedup(own, fixed),
            }
        return found

    def oracle_results(self) -> dict:
        """Theorem 4.1 in numbers, beside what the loop measured."""
        texts, own = self.oracle["texts"], self.timed_rows(ORACLE)
        tokens, calls, drafts = (
            np.array([text[name] for text in texts]) for name in ("tokens", "target_calls", "draft_forwards")
        )
        timed = [text for text in texts if text["measured_target_calls"] is not None]
        rate = self.times.predicted_rate
        return {
            **self.oracle,
            "verification_rate": calls.sum() / tokens.sum(),
            "discard_rate": 0.0,
            # The theorem's drafter runs only for tokens that are accepted; the loop looks at the next one, too.
            "theorem_tokens_per_s": rate(FIXED, tokens, tokens - calls, calls),
            "predicted_tokens_per_s": rate(FIXED, tokens, drafts, calls),
            "measured_tokens_per_s": measured_rate(own),
            "speedup": speedup(own, self.timed_rows(BASELINE)),
            "timed": len(timed),
            "equal": all(text["measured_target_calls"] == text["target_calls"] for text in timed),
            "measured_discarded": sum(text["measured_discarded"] for text in timed),
        }
