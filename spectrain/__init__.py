"""Train draft models for speculative decoding, and decode with them in one lossless loop.

from spectrain import LLM

llm = LLM("smollm2", method="auto")                     # a target's name or folder; a method's name or folder
reply = llm.chat("Name three colours.")
print(reply.text, reply.accepted, "of", reply.drafted, "drafted tokens accepted")
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from spectrain import caches
from spectrain.old_names import OldNames

if TYPE_CHECKING:
    from spectrain.decoding import TargetModel
    from spectrain.methods.registry import load_method
    from spectrain.serving.llm import LLM

__all__ = ["LLM", "load_method", "load_target"]

# Imported when they are asked for: the commands import this package too, and most need no model.
ON_DEMAND = {"LLM": "spectrain.serving.llm", "load_method": "spectrain.methods.registry"}

caches.settle()
sys.meta_path.append(OldNames())


def __getattr__(name: str) -> object:
    if name not in ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(ON_DEMAND[name]), name)


def load_target(name: str | Path = "pystdlib-8l", dtype: str = "float32", device: str = "auto") -> TargetModel:
    """Load the model whose text is decoded.

    Args:
        name: a bundled checkpoint, smollm2, which is downloaded once, a Hugging Face folder, or an id on the hub.
        dtype: float32, bfloat16 or float16.
        device: "auto" takes a GPU where there is one.

    Raises:
        UserError: says in one sentence what is missing or unsupported.
    """
    from spectrain.decoding import load_target
    from spectrain.methods.registry import name_of
    from spectrain.models.packages import target_path

    return load_target(target_path(name_of("target", name)), dtype, device)
