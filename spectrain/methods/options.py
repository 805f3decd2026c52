"""The options of a method: names, types and ranges, as the signature of what builds it states them.

Annotations are those of commands (`config/values.py`). A builder that passes options on to a class says so by
`**options: TheClass`.

Options `drafter`, `head` and `datastore` name folders. A method gets the folder that its own options name, else the one
that the user gave, else the one that fits best of those below `checkpoints/` and those that come with spectrain.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import hydra
from omegaconf import ListConfig, OmegaConf

from spectrain.config.training import SUGGESTED
from spectrain.config.values import Dtype as Dtype  # for methods of other projects
from spectrain.config.values import Nodes as Nodes
from spectrain.config.values import Probability as Share  # noqa: F401
from spectrain.config.values import Whole as Whole
from spectrain.config.values import checked, parts_of
from spectrain.decoding import Drafter
from spectrain.drafting.budget import AUTO
from spectrain.errors import UserError, nearest
from spectrain.models.artifacts import default_artifact, is_export, read_manifest
from spectrain.models.kinds import about, drafters
from spectrain.retrieval.datastore import largest_datastore
from spectrain.stores.locations import CHECKPOINTS
from spectrain.target import TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.target.loading import fetched

log = logging.getLogger(__name__)

FOLDERS = ("drafter", "head", "datastore")
PLAIN = {bool, float, int, str, type(None)}


def build_function(method: Mapping) -> Callable:
    """The class or function that a yaml's `_target_` names."""
    try:
        return hydra.utils.get_object(method["_target_"])
    except ImportError as error:
        if isinstance(error.__cause__, UserError):  # a `Drafter` that is refused
            raise error.__cause__ from None
        raise


def module_of(method: Mapping) -> ModuleType:
    build = build_function(method)
    return sys.modules[getattr(build, "__self__", build).__module__]  # of a class method its class's


def plain_options(method: Mapping) -> dict:
    """The options in a yaml: all but what builds the method."""
    values = OmegaConf.to_container(OmegaConf.create(dict(method)))
    return {key: value for key, value in values.items() if not key.startswith("_")}


def names(value: str | float | ListConfig | Sequence[str | float] | None) -> list:
    """The values of an option that takes one name or number, or a list of them."""
    return [value] if isinstance(value, str | float | int) else list(value or [])


def option_types(build: Callable) -> dict[str, object]:
    """Return the annotation of each option of a builder, by name. Any: it is checked where it is used."""
    function = build.__init__ if inspect.isclass(build) else build
    hints, found = get_type_hints(function, include_extras=True), {}
    for name, parameter in inspect.signature(build).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found = (option_types(hints[name]) if name in hints else {}) | found
        elif name != "target":
            hint = hints.get(name, Any)
            if limits := [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, int | str)]:
                write = "write it with annotated_types, such as Annotated[int, Ge(1)]"
                raise UserError(f"option {name} of {build.__name__} has the limit {limits[0]!r}; {write}")
            found[name] = hint if {part for part in parts_of(hint) if isinstance(part, type)} <= PLAIN else Any
    return found


def check_options(build: Callable, options: Mapping, method: str, where: str = "") -> None:
    """Raise UserError where a method has no such option, or a value is of another type or out of range.

    `where` stands before an option that the user has typed.
    """
    types = option_types(build)
    for name, value in options.items():
        if name not in types:
            hint = nearest(name, types) or f"; its options are {', '.join(types) or 'none'}"
            raise UserError(f"{where}{name} is not an option of {method}{hint}")
        checked(f"{where}{name}", value, types[name], strict=True)


def artifact_kinds(method: Mapping) -> dict[str, str]:
    """The folders that a method takes: their kinds, by the option that names them.

    A head brings its drafter, so that of a method with a head is not among them.
    """
    takes, kinds = inspect.signature(build_function(method)).parameters, {}
    if "head" in takes:
        kinds["head"] = "head"
    elif "drafter" in takes:
        kinds["drafter"] = method.get("tree") or module_of(method).DRAFTER
    if "datastore" in takes and method.get("datastore_source", True):
        is_wanted = takes["datastore"].default is inspect.Parameter.empty or method.get("datastore") is not None
        kinds |= {"datastore": "datastore"} if is_wanted else {}
    return kinds


def given_artifacts(
    drafter: str | Sequence[str] | None, head: str | None = None, datastore: str | None = None
) -> dict[str, str]:
    """The folders of `drafter=`, `head=` and `datastore=`, by kind. Raises UserError where two are of one kind.

    A drafter that is none of our exports is a plain Hugging Face model, of kind vanilla.
    """
    given = {kind: folder for kind, folder in {"head": head, "datastore": datastore}.items() if folder}
    for folder in names(drafter):
        kind = drafter_kind(folder)
        option = about(kind).option
        if option != "drafter":
            raise UserError(f"drafter={folder} is of kind {kind}; give it as {option}={folder}")
        if kind in given:
            raise UserError(f"drafter={folder} and drafter={given[kind]} are both {kind} drafters; give one per kind")
        given[kind] = folder
    return given


def drafter_kind(path_or_id: str) -> str:
    folder = Path(path_or_id)
    with suppress(UserError):  # of the hub, which whoever opens the drafter will say
        folder = fetched(path_or_id, "drafter", ["config.json"])
    return read_manifest(folder).kind if is_export(folder) else "vanilla"


def method_with(drafter: str) -> str:
    """Return the name of the method that decodes with a drafter."""
    return about(drafter_kind(drafter)).method or SUGGESTED


def check_taken(
    given: Mapping[str, str], methods: Iterable[Mapping], built: Iterable[Drafter], by_baselines: Iterable[str] = ()
) -> None:
    """Raise UserError where the user gave a folder that none of the methods, nor a baseline, takes.

    `given` are folders by kind, `by_baselines` kinds, and `methods` the yamls of what was asked for. Only of those that
    are `built` it is known which kind of drafter a head takes.
    """
    taken = {kind for options in methods for kind in artifact_kinds(options).values()} | set(by_baselines)
    taken |= {kind for drafter in built for kind in drafter.method.artifacts}
    for kind in given.keys() - taken:
        one, folder = about(kind), given[kind]
        if not Path(folder).exists():
            raise UserError(f"{one.option}={folder} is no folder here, and no method takes {one.a_noun}; correct it")
        raise UserError(f"{one.option}={folder} is {one.a_noun}, which none of the methods takes; remove it")


def chosen_folder(option: str, kind: str, own: str | None, given: str | None, target: TargetModel) -> str | None:
    """The folder of a method. `own`: as the method's options name it; "auto": one if there is one."""
    if own not in (None, AUTO):  # of a variant or an exported folder
        if given and own != given:
            log.warning("the method's own %s=%s is used instead of %s", option, own, given)
        return own
    if given:
        return given
    try:
        return find_artifact(kind, target)
    except UserError as error:
        if own is None:
            raise
        log.info("%s", error)
        return None


def method_of_kind(kind: str, function: str = "open_states") -> ModuleType:
    """The module of the method that drafts with a kind of drafter, and has this function.

    `open_states` and `of_states` open the states that acceptance heads read, `for_trees` the models of trees.
    """
    if (module := _method_of(kind)) is None or not hasattr(module, function):
        known = " or ".join(name for name, _ in drafters() if hasattr(_method_of(name), function))
        lacks = "is no drafter that trees go over" if function == "for_trees" else "has no hidden state to stop by"
        raise UserError(f"a {kind} {lacks}; give a drafter of kind {known}")
    return module


def _method_of(kind: str) -> ModuleType | None:
    method = about(kind).method
    return import_module(f"spectrain.methods.{method}") if method else None


def find_artifact(kind: str, target: TargetModel) -> str:
    """The best folder of this kind that fits, of those below `checkpoints/` and those that come with spectrain.

    Raises UserError where there is none.
    """
    print_ = fingerprint(target.model, target.tokenizer)
    if kind == "datastore":
        if target.tokenizer is None:
            raise UserError("a datastore is of a tokenizer, which this target does not have; give datastore=<folder>")
        folder = largest_datastore(CHECKPOINTS, tokenizer_fingerprint(target.tokenizer), print_)
    else:
        folder = default_artifact(CHECKPOINTS, kind, print_)
    _say(about(kind).option, str(folder))
    return str(folder)


@cache
def _say(option: str, folder: str) -> None:
    """Once, although several methods find the same."""
    log.info("%s: %s", option, folder)
