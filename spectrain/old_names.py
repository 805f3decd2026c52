"""Modules that exported folders, cards and methods outside of this project still call by earlier names."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "spectrain.drafting.draft_tree": "spectrain.drafting.tree_drafter",
    "spectrain.methods.folders": "spectrain.methods.options",
    "spectrain.methods.loading": "spectrain.methods.registry",
    "spectrain.methods.lookup": "spectrain.drafting.lookup",
    "spectrain.serving.transformers_generate": "spectrain.exports.transformers_generate",
    "spectrain.serving.vllm_proposer": "spectrain.exports.vllm_proposer",
}


class OldNames(MetaPathFinder, Loader):
    """Finds the modules of `MOVED` by their earlier names; each is the same object as by its present name."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(MOVED[module.__name__])
