"""From the counts and seconds of stop rules to the results of `spectrain.tune method=specdecpp`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pandas import DataFrame

from spectrain.measure.draft_paths import DraftPaths
from spectrain.measure.pareto import compare, front
from spectrain.measure.statistics import Estimate, ratio_of_sums, speedup
from spectrain.measure.stop_simulation import FIXED, HEAD, Counts, Setting, simulate_oracle
from spectrain.measure.stop_times import Times, fit_times
from spectrain.methods.registry import BASELINE
from spectrain.stores.folder import strict

ORACLE = "oracle"
RESAMPLES, HEAD_RESAMPLES = 2000, 500  # bootstraps of fronts, and of each head's own
DEFINITIONS = {
    "verification_rate": "target forwards per token; prefill and the first token are left out",
    "discard_rate": "drafted tokens that were not emitted, per token",
    "tokens_per_s": "tokens after the first / seconds after prefill",
    "predicted": "T = target_s N_target + draft_s[family] N_draft, from the regression on timed prompts",
}


def predicted(settings: Sequence[Setting], counts: Counts, times: Times) -> DataFrame:
    """Describe every setting with its rates and the speed that follows from them, one row per setting."""
    frame = DataFrame(settings, dtype=object)  # a draft length stays a whole number beside thresholds
    frame.insert(0, "name", list(map(str, settings)))
    frame[["verification_rate", "discard_rate", "draft_forwards_rate"]] = counts.rates.T
    frame["tau"] = 1 / frame.verification_rate
    per_text = zip(frame.family, counts.draft_forwards, counts.target_calls, strict=True)
    rates = [times.predicted_rate(family, counts.tokens, *costs) for family, *costs in per_text]
    frame["predicted_tokens_per_s"] = [rate.value for rate in rates]
    frame["predicted_tokens_per_s_ci95"] = [[rate.low, rate.high] for rate in rates]
    return frame


def fastest(settings: DataFrame, by: list[str]) -> DataFrame:
    """The fastest settings of the groups, as predicted."""
    return settings.loc[settings.groupby(by, sort=False)["predicted_tokens_per_s"].idxmax()]


def stop_results(settings: DataFrame, counts: Counts, times: Times, regression: DataFrame, timed: DataFrame) -> dict:
    """The content of `results.json`, without the oracle and what was asked for.

    Args:
        settings: of `predicted`; row i belongs to entry i of the counts.
        counts: of all texts.
        times: fitted to the regression.
        regression: timed rows of some settings and of plain decoding.
        timed: of the best settings, of plain decoding and the oracle.
    """
    families = numbers_of(settings, "family")
    judged = {f"{HEAD}, {judge}": own for judge, own in numbers_of(settings, "judge").items()}
    rates, names, groups = counts.rates[:2], settings["name"], families | judged
    found = compare(counts, families, RESAMPLES)
    areas = found.families[["area", "mean_discard_rate", "held_out_mean_discard_rate"]].to_dict("index")
    # The heads' front less that of each other family, and the two ways to judge.
    pairs = [(HEAD, family) for family in families if family != HEAD] + ([tuple(judged)] if len(judged) == 2 else [])
    return strict(
        {
            "definitions": DEFINITIONS,
            "settings": settings.to_dict("records"),
            "fronts": {name: [names[own[i]] for i in front(rates[:, own])] for name, own in groups.items()},
            "areas": {"verification_rates": [found.fronts.low, found.fronts.high], "families": areas},
            "differences": [difference(counts, groups, *pair, RESAMPLES) for pair in pairs],
            "single_heads": single_heads(settings, counts, families[FIXED]),
            "times": regression_results(times, regression),
            "best": best_results(settings, timed),
        }
    )


def numbers_of(settings: DataFrame, by: str) -> dict[str, list[int]]:
    """The numbers of the settings by one of their columns, without those that have none."""
    return {key: own.index.tolist() for key, own in settings.groupby(by, sort=False)}


def difference(counts: Counts, groups: Mapping[str, Sequence[int]], name: str, minus: str, n_resamples: int) -> dict:
    """The mean discard rate along the front of one group less that of another, over what both reach."""
    compared = compare(counts, {minus: groups[minus], name: groups[name]}, n_resamples)
    own = compared.families.loc[name]
    return {
        "family": name,
        "minus": minus,
        "verification_rates": [compared.fronts.low, compared.fronts.high],
        "areas": compared.families.area[[name, minus]].tolist(),
        "mean_discard_rate_difference": own.difference,
        "held_out": own.held_out_difference,
        "share_on_or_below": compared.fronts.shares_below()[name],
    }


def single_heads(settings: DataFrame, counts: Counts, fixed: Sequence[int]) -> list[dict]:
    """Each head and way to judge: its fastest threshold (Table 3), and its front against that of fixed lengths."""
    best = fastest(settings, ["head", "judge"]).to_dict("records")
    found = []
    for one, ((head, judge), own) in zip(best, settings.groupby(["head", "judge"], sort=False), strict=True):
        groups = {FIXED: fixed, f"{head}, {judge}": own.index.tolist()}
        against = difference(counts, groups, f"{head}, {judge}", FIXED, HEAD_RESAMPLES)
        found.append({"head": head, "judge": judge, "best": one, "difference": against})
    return found


def regression_results(times: Times, regression: DataFrame) -> dict:
    """Table 2: the joint regression, one regression per family, and the target by itself."""

    def fit(family: str) -> dict:
        own = fit_times(regression[regression.family == family], n_resamples=0)
        draft = {} if family == BASELINE else {"draft_s": own.draft_s[family]}
        return {"target_s": own.target_s, **draft, "r2": own.r2, "r2_uncentred": own.r2_uncentred}

    intervals = times.intervals()
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
        "rows": regression.to_dict("records"),
    }


def best_results(settings: DataFrame, timed: DataFrame) -> dict:
    """Table 3: plain decoding and the fastest setting of each family, predicted and measured."""
    best = {one["family"]: one for one in fastest(settings, ["family"]).to_dict("records")}
    fixed = timed[timed.setting == best[FIXED]["name"]]
    found = {}
    for family, one in ({BASELINE: {"name": BASELINE}} | best).items():
        own = timed[timed.setting == one["name"]]
        found[family] = one | {
            "tau_measured": ratio_of_sums(own.tokens, own.target_calls),
            "measured_tokens_per_s": ratio_of_sums(own.tokens, own.seconds),
            "speedup": measured_speedup(own, timed[timed.setting == BASELINE]),
            "over_best_fixed_gamma": measured_speedup(own, fixed),
        }
    return found


def oracle_results(texts: Sequence[DraftPaths], gamma: int | None, times: Times, timed: DataFrame) -> dict:
    """Theorem 4.1 in numbers, beside what the loop measured. `gamma` is the longest draft; None: without limit."""
    counts, own = simulate_oracle(texts, gamma), timed[timed.setting == ORACLE]
    tokens, calls, forwards = counts.tokens, counts.target_calls[0], counts.draft_forwards[0]
    measured = {row.question: (row.target_calls, row.discarded) for row in own.itertuples()}
    real_calls, real_discarded = zip(*(measured.get(i, (None, None)) for i in range(len(texts))), strict=True)
    missed = [paths.accepted == 0 if gamma is None else None for paths in texts]  # S of the theorem
    columns = {
        "question": range(len(texts)),
        "tokens": tokens,
        "disagreements": [None if places is None else int(places.sum()) for places in missed],
        "last_token_disagrees": [None if places is None else bool(places[-1]) for places in missed],
        "target_calls": calls,
        "draft_forwards": forwards,
        "measured_target_calls": real_calls,
        "measured_discarded": real_discarded,
    }
    return strict(
        {
            "longest_draft": gamma,
            "texts": DataFrame(columns, dtype=object).to_dict("records"),
            "verification_rate": float(calls.sum() / tokens.sum()),
            "discard_rate": 0.0,
            # The theorem's drafter runs only for tokens that are accepted; the loop looks at the next one, too.
            "theorem_tokens_per_s": times.predicted_rate(FIXED, tokens, tokens - calls, calls),
            "predicted_tokens_per_s": times.predicted_rate(FIXED, tokens, forwards, calls),
            "measured_tokens_per_s": ratio_of_sums(own.tokens, own.seconds),
            "speedup": measured_speedup(own, timed[timed.setting == BASELINE]),
            "timed": len(measured),
            "equal": all(real == calls[i] for i, (real, _) in measured.items()),
            "measured_discarded": sum(discarded for _, discarded in measured.values()),
        }
    )


def measured_speedup(rows: DataFrame, baseline: DataFrame) -> Estimate:
    """The ratio of tokens per second on the questions that both have answered."""
    both = rows.merge(baseline, on="question")
    return speedup(both.tokens_x, both.seconds_x, both.tokens_y, both.seconds_y)
