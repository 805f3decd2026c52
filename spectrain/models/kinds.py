"""The catalogue of what is trained and exported: one record for each kind.

A trained kind is a module of `spectrain.models` that has its name and a constant `KIND`. Whatever differs from kind to
kind outside of its own files is a field of `Kind`, so nothing else names one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType

from spectrain.config.training import EXPERIMENTS
from spectrain.errors import UserError, shown


@dataclass(frozen=True)
class Kind:
    """A kind of artifact."""

    option: str  # by which a user gives a folder of this kind
    noun: str
    made_by: str  # the command that makes one
    method: str | None = None  # of conf/method/, which decodes with it; None: each folder names its own
    library: str = "spectrain"  # that opens it, as the hub names libraries
    about: str = ""  # what it is, as its model card says
    # The methods that method=auto tries with a drafter of this kind, and those that each of them makes superfluous.
    auto: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # The module of spectrain.exports whose `write_for_engine` writes what other engines need of an export, in `FOLDER`.
    engine: str | None = None
    # The module of spectrain.measure whose `check` tries other readings of its folders; None: they have one reading.
    check: str | None = None
    # Whether a config.json that other projects write is of a drafter that this kind reads, or refuses by its name.
    recognises: Callable[[Mapping], bool] | None = None

    @property
    def command(self) -> str:
        """How one is made for a target, as it is typed."""
        return f"spectrain {self.made_by.partition('.')[2]} target=<target>"

    @property
    def a_noun(self) -> str:
        return f"{'an' if self.noun[0] in 'AEIOaeio' else 'a'} {self.noun}"


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
    unknown = UserError(f"kind {shown(kind)} is unknown to this version of spectrain; install a newer one")
    try:
        found = getattr(module_of(kind), "KIND", None)
    except (ModuleNotFoundError, ValueError) as error:
        if not f"spectrain.models.{kind}".startswith(getattr(error, "name", None) or ""):
            raise  # the kind is known, and something that it imports is not here
        raise unknown from None
    if found is None:
        raise unknown
    return found


def module_of(kind: str) -> ModuleType:
    """Return the module of a trained kind, which has `load` where an engine needs files of it (`Kind.engine`)."""
    return import_module(f"spectrain.models.{kind}")


def drafters() -> Iterator[tuple[str, Kind]]:
    """Yield the kinds of trained drafters with their names, in the order of their experiments."""
    for name in EXPERIMENTS:
        if (kind := about(name)).option == "drafter":
            yield name, kind
