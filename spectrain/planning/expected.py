"""Which tau a training may expect, by what earlier drafters of its kind for its target have reached.

The expected tau of a validation grows about evenly with the logarithm of the tokens that were learned from.
"""

from __future__ import annotations

from math import log
from pathlib import Path

import numpy as np

from spectrain.config.training import Train
from spectrain.errors import UserError
from spectrain.models.artifacts import MANIFEST, Artifact, read_manifest
from spectrain.models.pruned_init import NEW
from spectrain.stores import locations
from spectrain.training.base import experiment_type

FEWEST_TOKENS = 10_000  # of a drafter that counts


def expected_tau(config: Train, tokens: int) -> str | None:
    """Say in a sentence which tau a training on so many tokens may expect; None: no drafter is known to compare with.

    Drafters below `checkpoints/`, those that come with spectrain, and the folder `init` count, each with all tokens
    that it has learned from.
    """
    before, known, init = 0, {}, init_of(config)
    for folder in folders(config):
        try:
            artifact = read_manifest(folder)
        except UserError:
            continue
        if artifact.kind == experiment_type(config).exports and is_of(config.target.path, artifact):
            learned, tau = learned_from(artifact), artifact.trained.get("metrics", {}).get("eval/tau_expected")
            before = learned if init and folder.resolve() == init.resolve() else before
            if tau and learned >= FEWEST_TOKENS:
                known[learned] = max(tau, known.get(learned, 0.0))
    if not known:
        return None
    known, total = dict(sorted(known.items())), before + tokens
    facts = ", ".join(f"{tau:.2f} after {learned:,} tokens" for learned, tau in known.items())
    least, most = min(known), max(known)
    where = "at most" if total < least else "at least" if total > most else "about"
    tau = np.interp(log(total), [log(one) for one in known], [*known.values()])
    return f"expected tau {where} {tau:.2f} after {total:,} tokens: drafters of this kind for this target have {facts}"


def folders(config: Train) -> list[Path]:
    """Return the folders of exported drafters that a training is compared with."""
    own = [file.parent for file in sorted(locations.CHECKPOINTS.glob(f"*/{MANIFEST}"))]
    found = (*locations.shipped_folders(locations.SHIPPED), *own, *filter(None, [init_of(config)]))
    return list({one.resolve(): one for one in found}.values())


def init_of(config: Train) -> Path | None:
    """Return the folder of the drafter that is trained further; None: a new one is."""
    init = getattr(config.own, "init", NEW[0])
    return None if init in NEW else Path(init)


def is_of(target: str, artifact: Artifact) -> bool:
    """Return whether a drafter was trained for this target, by its folder: nothing of the target is loaded."""
    one, other = (Path(locations.bundled_folder(name) or name).resolve() for name in (artifact.target, target))
    return artifact.target == target or one == other


def learned_from(artifact: Artifact) -> int:
    """Return the tokens of all trainings of a drafter."""
    return sum(one.get("tokens", 0) for one in (artifact.trained, *artifact.trained.get("before", [])))
