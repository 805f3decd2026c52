"""Trees over a trained drafter, alone or together with what SSSD finds; see `spectrain.drafting.tree_drafter`."""

from __future__ import annotations

from typing import Literal

from spectrain.config.values import Dtype, Nodes, Whole
from spectrain.drafting.budget import AUTO
from spectrain.drafting.tree_drafter import BRANCHES, LEVELS, TreeDrafter
from spectrain.methods.options import method_of_kind
from spectrain.methods.sssd import Sssd, SssdOptions
from spectrain.retrieval.datastore import open_datastore
from spectrain.target import TargetModel


def build(
    target: TargetModel,
    drafter: str,
    tree: str,
    lookup: Literal["sssd"] | None = None,
    datastore: str | None = None,
    branches: Whole = BRANCHES,
    levels: Whole = LEVELS,
    draft_dtype: Dtype = "auto",
    draft_vocab: Whole | Literal["auto"] | None = AUTO,
    max_nodes: Nodes = 60,  # EAGLE-2
) -> TreeDrafter:
    """Build trees over a trained drafter; conf/method/spire_tree.yaml explains the options."""
    of_weights = {"draft_dtype": draft_dtype, "draft_vocab": draft_vocab}
    model = method_of_kind(tree, "for_trees").for_trees(target, drafter, levels, branches, **of_weights)
    found = None
    if lookup is not None:
        store = None if datastore is None else open_datastore(datastore, target)
        found = Sssd(store, SssdOptions(datastore_source=store is not None))
    return TreeDrafter(model, max_nodes, branches, model.gamma, found)
