"""Search for SSSD's discounts, and calibrate its sources, on texts that the target wrote.

Every combination of a grid is tried on half of the texts by simulation. The best one is calibrated, and what was chosen
is compared with the method's own options on the other half.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import track

from spectrain.measure.simulation import Text, simulate
from spectrain.measure.statistics import Estimate, ratio_of_sums
from spectrain.methods.sssd import Sssd, SssdOptions
from spectrain.retrieval.calibration import calibrate

NEUTRAL = ("input_scale", "input_prefix_decay", "input_depth_decay", "datastore_prefix_decay", "datastore_depth_decay")


def with_options(opened: Sssd, options: Mapping) -> Sssd:
    """The method over the datastore that is open already, with the options of a yaml."""
    own = {name: value for name, value in options.items() if name in SssdOptions.__dataclass_fields__}
    return Sssd(opened.store, SssdOptions(**own), opened.max_nodes)


def tau_of(drafter: Sssd, texts: Sequence[Text]) -> Estimate:
    """Acceptance length, with its interval over texts."""
    steps = [simulate(drafter, text) for text in texts]
    return ratio_of_sums([sum(s) for s in steps], [len(s) for s in steps])


def choose_options(opened: Sssd, method: Mapping, grid: Mapping[str, Sequence], texts: Sequence[Text]) -> dict:
    """Choose the options with the largest acceptance length.

    Args:
        opened: the method over its datastore.
        method: its yaml; gives the options that are not in the grid.
        grid: option -> values to try.
        texts: two answers of the target or more; every other one decides, the rest tell the result.

    Returns:
        `options`: those chosen, `tau`: an Estimate of each of the three candidates on the texts that did not decide,
        `winner`: the name of the chosen one, `tried`: tau of each combination, `responses`: texts of both halves.

    Raises:
        UserError: an option is out of range.
    """
    deciding, telling = texts[::2], texts[1::2]
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    tried = [
        {**changes, "tau": tau_of(with_options(opened, {**method, **changes}), deciding).value}
        for changes in track(combinations, "combinations", console=Console(stderr=True))
    ]
    best_discounts = {**method, **combinations[max(range(len(tried)), key=lambda i: tried[i]["tau"])]}
    lookup = with_options(opened, best_discounts)
    factors = calibrate(
        *([(text.prompt, text.response) for text in deciding], lookup.retrievers[0]),
        *(lookup.options.max_prefix, lookup.branch_tokens),
    )
    # Measured factors take the place of the discounts.
    calibration = {**(best_discounts.get("calibration") or {}), **factors}
    calibrated = {**best_discounts, **dict.fromkeys(NEUTRAL, 1.0), "calibration": calibration}
    candidates = {"defaults": method, "best discounts": best_discounts, "calibrated": calibrated}
    # Of equal candidates the plainest, which stands first.
    winner = max(candidates, key=lambda name: tau_of(with_options(opened, candidates[name]), deciding).value)
    return {
        "options": candidates[winner],
        "tau": {name: tau_of(with_options(opened, options), telling) for name, options in candidates.items()},
        "winner": winner,
        "tried": tried,
        "responses": [len(deciding), len(telling)],
    }
