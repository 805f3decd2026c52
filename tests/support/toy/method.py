"""`method=toy`."""

from __future__ import annotations

from pathlib import Path

from spectrain.models.toy import load

from spectrain.drafting.draft_chain import lengths_of
from spectrain.drafting.model_drafter import ModelDrafter
from spectrain.methods.options import Dtype, Nodes, Whole
from spectrain.models.artifacts import fastest_gamma, trained_acceptance
from spectrain.target import TargetModel

DRAFTER = "toy"


class ToyMethod(ModelDrafter):
    """Drafts with a `ToyDrafter`."""


def build(
    target: TargetModel,
    drafter: str,
    gamma: Whole | None = None,
    max_nodes: Nodes | None = None,
    draft_dtype: Dtype = "auto",
) -> ToyMethod:
    loaded, acceptance = load(Path(drafter), target), trained_acceptance(Path(drafter))
    fastest = fastest_gamma(Path(drafter)) or loaded.config.k
    length, budget = lengths_of(gamma, max_nodes, fastest, loaded.config.window_tokens, acceptance)
    return ToyMethod(loaded, length, draft_dtype=draft_dtype, budget=budget)


def for_trees(target: TargetModel, drafter: str, levels: int, branches: int, draft_dtype: str, **_) -> ToyMethod:
    n_read = 1 + branches * (levels - 1)
    return ToyMethod(load(Path(drafter), target), levels, draft_dtype=draft_dtype, tree_nodes=n_read)
