"""Kinds of artifacts. A trained kind is a module of `spectrain.models` with a constant `KIND`, named after the kind."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec


@dataclass(frozen=True)
class Kind:
    """A kind of artifact, as messages name it."""

    option: str  # by which a user gives a folder of this kind
    noun: str
    made_by: str  # the command that makes one
    method: str | None = None  # of conf/method/, which decodes with it; None: each folder names its own


NOT_TRAINED = {
    "lookup": Kind("drafter", "lookup method", "spectrain.export method=..."),
    "datastore": Kind("datastore", "datastore", "data_prep.datastore"),
}


def about(kind: str) -> Kind:
    """Describe a kind of artifact; one that is not known here, as a folder of another version may have, by its name."""
    if kind in NOT_TRAINED:
        return NOT_TRAINED[kind]
    is_module = kind.isidentifier() and find_spec(f"spectrain.models.{kind}") is not None
    known = getattr(import_module(f"spectrain.models.{kind}"), "KIND", None) if is_module else None
    return known or Kind("drafter", kind, f"spectrain.train +exp={kind}")
