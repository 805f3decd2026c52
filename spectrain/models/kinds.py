"""Kinds of artifacts. A trained kind is a module of `spectrain.models` that has its name and a constant `KIND`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from spectrain.errors import UserError, shown


@dataclass(frozen=True)
class Kind:
    """A kind of artifact, as messages name it."""

    option: str  # by which a user gives a folder of this kind
    noun: str
    made_by: str  # the command that makes one
    method: str | None = None  # of conf/method/, which decodes with it; None: each folder names its own
    library: str = "spectrain"  # that opens it, as the hub names libraries
    about: str = ""  # what it is, as its model card says


HEAD = Kind(
    *("head", "SpecDec++ head", "spectrain.train +exp=specdecpp"),
    method="specdecpp",
    about="An acceptance head (SpecDec++): it reads the state of a draft model after each drafted token, and ends the "
    "draft once it expects a rejection. The draft model is in `drafter/`.",
)
OTHERS = {
    "specdecpp": HEAD,  # as its experiment is called
    "target": Kind(
        *("target", "target", "spectrain.train +exp=target", None, "transformers"),
        "A small Llama trained from scratch, as a target for drafters.",
    ),
    "lookup": Kind("drafter", "lookup method", "spectrain.export method=..."),
    "datastore": Kind("datastore", "datastore", "data_prep.datastore"),
}


def about(kind: str) -> Kind:
    """Describe a kind of artifact. Raise UserError where there is none of this name."""
    if kind in OTHERS:
        return OTHERS[kind]
    try:
        return import_module(f"spectrain.models.{kind}").KIND
    except (ModuleNotFoundError, AttributeError, ValueError):
        raise UserError(f"kind {shown(kind)} is unknown to this version of spectrain; install a newer one") from None
