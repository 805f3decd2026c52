"""Which tau a training may expect, by what earlier drafters of its kind for its target have reached.

The expected tau of a validation grows about evenly with the logarithm of the tokens that were learned from.
"""

from __future__ import annotations

from math import log
from pathlib import Path

import numpy as np

from spectrain.config.training import Train
from spectrain.errors import UserError
from spectrain.models.artifacts import export_folders, read_manifest
from spectrain.models.pruned_init import NEW
from spectrain.planning.plan import Plan
from spectrain.stores import locations
from spectrain.training.base import experiment_type

FEWEST_TOKENS = 10_000  # of a drafter that counts


def tau_sentence(config: Train, plan: Plan) -> str | None:
    """Say which tau a training may expect; None: nothing is known to compare it with.

    Drafters below `checkpoints/`, those that come with spectrain, and the folder `init` count, if they draft as many
    tokens as this one, each with all tokens that it has learned from.
    """
    if plan.steps is None:
        return None
    init = getattr(config.own, "init", NEW[0])
    known, before = reached(config, plan.drafted), 0 if init in NEW else learned_from(trained_as(Path(init)))
    if not known or (before == 0 and init not in NEW):
        return None
    total, points = before + plan.tokens, np.array(sorted(known.items()))
    place = int(np.searchsorted(points[:, 0], total))
    where = "at most" if place == 0 else "at least" if place == len(points) else "about"
    tau = np.interp(log(total), np.log(points[:, 0]), points[:, 1])
    beside = points[max(0, place - 1) : place + 1]
    facts = ", ".join(f"{tau:.2f} after {learned:,.0f} tokens" for learned, tau in beside)
    what = f"{experiment_type(config).exports} drafters for {config.target.path}"
    return f"expected tau {where} {tau:.2f} after {total:,} tokens: {what} have {facts}"


def reached(config: Train, drafted: int) -> dict[int, float]:
    """Return the best expected tau of earlier drafters that draft so many tokens, by the tokens they learned from."""
    known: dict[int, float] = {}
    for folder in export_folders(locations.CHECKPOINTS):
        trained = trained_as(folder, experiment_type(config).exports, config.target.path)
        metrics, learned = trained.get("metrics") or {}, learned_from(trained)
        tau, n = metrics.get("eval/tau_expected"), sum(name.startswith("eval/alpha_step_") for name in metrics)
        if tau and n == drafted and learned >= FEWEST_TOKENS:
            known[learned] = max(tau, known.get(learned, 0.0))
    return known


def trained_as(folder: Path, kind: str | None = None, target: str | None = None) -> dict:
    """Return what an export says of its training; {} where there is none, or it is of another kind or target.

    Targets are compared by their folders, because none is loaded for a plan.
    """
    try:
        artifact = read_manifest(folder)
    except (UserError, OSError):
        return {}
    if kind is None:
        return artifact.trained
    one, other = (Path(locations.bundled_folder(name) or name).resolve() for name in (artifact.target, target))
    return artifact.trained if (artifact.kind, one) == (kind, other) else {}


def learned_from(trained: dict) -> int:
    """Return the tokens of all trainings of a drafter; 0 where they are not known of one of them."""
    tokens = [one.get("tokens") for one in (trained, *(trained.get("before") or []))]
    return sum(tokens) if all(tokens) else 0
