"""Every method by its name: one yaml in `conf/method/` and one file in this package.

`generate`, `bench`, exports, serving and the tests find methods here and nowhere else. The `_target_` of a yaml is a
class or function that builds the method, and the rest of the yaml are its options. Its signature says what it takes:
the target, where it has a parameter `target`; folders, where it has `drafter`, `head` or `datastore`, which are found
or asked for here; and the options with their types (`options.py`). The default of `max_nodes` is that of the paper;
None: all, or gamma + 1. The module may say more by two constants:

    DRAFTER = "spire"      the kind of its drafter: spire or vanilla; trees have an option `tree` for it
    TOKENS_ONLY = True     it drafts from tokens alone, so that a serving engine can run it

Every builder raises UserError where options contradict each other, or a folder is missing, damaged or does not fit.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import hydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from spectrain.config import conf_dir
from spectrain.config.commands import Bench, Generate, Responses
from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.errors import UserError
from spectrain.methods.auto import METHODS, Auto
from spectrain.methods.budget import AUTO
from spectrain.methods.lookup import LookupDrafter
from spectrain.methods.options import check_options, option_types
from spectrain.models.artifacts import check_weights, decoded_by, default_artifact, is_export, read_manifest
from spectrain.models.head import own_drafter, read_head_facts
from spectrain.models.kinds import about
from spectrain.retrieval.datastore import newest_datastore
from spectrain.stores.folder import digest
from spectrain.stores.locations import CHECKPOINTS

log = logging.getLogger(__name__)

PAPER = "paper"  # max_nodes=paper
BASELINE = "autoregressive"  # the method that all others are compared with
FOLDERS = ("drafter", "head", "datastore")  # options that name folders


def method_names() -> list[str]:
    """All methods of `conf/method/`, in alphabetical order."""
    return sorted(file.stem for file in (conf_dir() / "method").glob("*.yaml"))


def method_config(name: str, max_nodes: int | str | None = None) -> DictConfig:
    """Read `conf/method/<name>.yaml`, with another node budget where one is given; see `with_nodes`."""
    config = OmegaConf.load(conf_dir() / "method" / f"{name}.yaml")
    for base in config.pop("defaults", []):  # as Hydra composes it: another method with other options
        if base != "_self_":
            config = OmegaConf.merge(method_config(base), config)
    return with_nodes(config, max_nodes)


def with_nodes(method: DictConfig, max_nodes: int | str | None) -> DictConfig:
    """Return a method with another node budget, if it has a budget.

    "paper" is that of its paper. A number is for trees: a method that drafts a chain keeps its own length.
    """
    if max_nodes == PAPER:
        return with_papers_nodes(method)
    drafts_trees = not any(length in method for length in ("gamma", "max_candidates"))
    if max_nodes is not None and "max_nodes" in method and (max_nodes == AUTO or drafts_trees):
        return OmegaConf.merge(method, {"max_nodes": max_nodes})
    return method


def with_papers_nodes(method: DictConfig) -> DictConfig:
    """A method that drafts as many tokens as in its paper, and in its order, where its `max_nodes` is auto."""
    return OmegaConf.merge(method, {"max_nodes": PAPER}) if method.get("max_nodes") == AUTO else method


def method_configs(command: Bench, reserved: Collection[str] = ()) -> dict[str, DictConfig]:
    """Every method, variant and exported folder that the config names, with its options; plain decoding first.

    Args:
        command: its `methods`, `variants` and `max_nodes`.
        reserved: names that a variant must not have.

    Raises:
        UserError: a name is neither a file of `conf/method/`, a variant nor an exported folder, or an option is none of
            the method's.
    """
    taken = [name for name in command.variants if name in (BASELINE, *reserved)]
    if taken:
        raise UserError(f"variants.{taken[0]} has the name of what others are compared with; give it another name")
    files = method_names()
    known = list(dict.fromkeys([*files, *command.variants]))
    found = {}
    for name in dict.fromkeys([BASELINE, *(known if takes_all(command) else names(command.methods))]):
        changes, exported = dict(command.variants.get(name) or {}), {}
        base = changes.pop("method", name)
        if name not in known:
            if not is_export(name):
                raise UserError(f"methods={name} is unknown; choose among {', '.join(known)}, or all; or give a folder")
            base, exported = decoded_by(Path(name))
        if base not in files:
            raise UserError(f"variants.{name} has method={base}, which is unknown; choose among {', '.join(files)}")
        options = method_config(base, command.max_nodes)
        check_options(build_function(options), changes, base, f"variants.{name}.")
        found[name] = OmegaConf.merge(options, changes, exported)
    return found


def takes_all(command: Bench) -> bool:
    return "all" in names(command.methods)


def build_function(method: Mapping) -> Callable[..., Drafter]:
    """The class or function that a yaml's `_target_` names."""
    return hydra.utils.get_object(method["_target_"])


def instantiate(method: Mapping, target: TargetModel | None, options: Mapping) -> Drafter:
    """Call what a yaml's `_target_` names with these options, and with the target where it takes one."""
    create = hydra.utils.instantiate({"_target_": method["_target_"], **options}, _partial_=True, _convert_="all")
    return create(target) if "target" in inspect.signature(build_function(method)).parameters else create()


def module_of(method: Mapping) -> ModuleType:
    return sys.modules[build_function(method).__module__]


def plain_options(method: Mapping) -> dict:
    """The options in a yaml: all but what builds the method."""
    values = OmegaConf.to_container(OmegaConf.create(dict(method)))
    return {key: value for key, value in values.items() if not key.startswith("_")}


def names(value: str | float | ListConfig | Sequence[str | float] | None) -> list:
    """The values of an option that takes one name or number, or a list of them."""
    return [value] if isinstance(value, str | float | int) else list(value or [])


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
        kind = read_manifest(Path(folder)).kind if is_export(folder) else "vanilla"
        option = about(kind).option
        if option != "drafter":
            raise UserError(f"drafter={folder} is of kind {kind}; give it as {option}={folder}")
        if kind in given:
            raise UserError(f"drafter={folder} and drafter={given[kind]} are both {kind} drafters; give one per kind")
        given[kind] = folder
    return given


def check_taken(
    given: Mapping[str, str], methods: Iterable[DictConfig], built: Iterable[Drafter], by_baselines: Iterable[str] = ()
) -> None:
    """Raise UserError where the user gave a folder that none of the methods, nor a baseline, takes.

    Args:
        given: folders by kind.
        methods: the yamls of what was asked for, built or not.
        built: the built methods: only then is it known which kind of drafter a head takes.
        by_baselines: kinds.
    """
    taken = {kind for options in methods for kind in artifact_kinds(options).values()} | set(by_baselines)
    taken |= {kind for drafter in built for kind in drafter.artifacts}
    for kind in given.keys() - taken:
        one = about(kind)
        raise UserError(f"{one.option}={given[kind]} is a {one.noun}, which none of the methods takes; remove it")


def build_method(
    method: DictConfig,
    target: TargetModel | None,
    artifacts: Mapping[str, str] | None = None,
    sampling: Sampling | None = None,
    ranks: bool = True,
) -> Drafter:
    """Build a method of `conf/method/` for this target.

    A method that takes a folder (see the top of this file) gets the one that its own options name, else the one that
    the user gave, else the one that fits best of those below `checkpoints/` and those that come with spectrain.

    Args:
        method: the yaml's content.
        target: what is decoded; None: a serving engine's, of which nothing is at hand but the tokens.
        artifacts: folders that the user gave, by kind; those that the method does not take are left alone.
        sampling: for which heads are looked up; None: not known yet, so no head is said to be of another one.
        ranks: whether a lookup with a fixed number of nodes scores the likeliest candidates, and not the first in its
            own order, as "paper" does in any case.

    Raises:
        UserError: an option is unknown or out of range, or a folder is missing or does not fit.
    """
    artifacts, build = {} if artifacts is None else artifacts, build_function(method)
    name = build.__module__.rpartition(".")[2]
    if target is None:  # whose steps cannot be timed
        method = with_papers_nodes(method)
    options = plain_options(method)
    given = {key: value for key, value in options.items() if value is not None or key not in FOLDERS}
    check_options(build, given, name)
    if build is Auto:
        drafter = _build_auto(names(options.get("methods")), target, artifacts, sampling)
        drafter.target = target
        return drafter
    chooses = options.get("max_nodes") == AUTO and options.get("gamma") is None
    ranks = ranks and target is not None and type(options.get("max_nodes")) is int
    if options.get("max_nodes") == PAPER:
        del options["max_nodes"]
    kinds = artifact_kinds(method)
    for option, kind in kinds.items():
        options[option] = _folder(option, kind, options.get(option), artifacts.get(kind), target)
    if "datastore" not in kinds and "datastore" in option_types(build):
        options["datastore"] = None
    if "head" in kinds:
        drafter_kind, options["drafter"] = _drafter_of_head(options["head"], target, artifacts)
    drafter = instantiate(method, target, options)
    if "head" in kinds:
        drafter.artifacts = {"head": options["head"], drafter_kind: options["drafter"]}
        facts = read_head_facts(Path(options["head"]), fingerprint(target.model, target.tokenizer))
        drafter.warning = facts.why_off(options["head"], sampling) if sampling is not None else None
        if drafter.warning:
            log.warning("%s", drafter.warning)
    drafter.timed_as = f"{name}-{digest(options)}"
    if ranks and isinstance(drafter, LookupDrafter):
        drafter.rank()
    if chooses:
        drafter = Auto({name: drafter})
    drafter.target = target
    return drafter


def _folder(option: str, kind: str, own: str | None, given: str | None, target: TargetModel) -> str | None:
    """The folder of an artifact. `own`: as the method's options name it; "auto": one if there is one."""
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


def _build_auto(
    asked: Sequence[str], target: TargetModel, artifacts: Mapping[str, str], sampling: Sampling | None
) -> Auto:
    """Build method=auto over the methods that it names; else over all of `auto.METHODS` that can be built.

    Raises:
        UserError: one that is named, or whose folder was given, cannot be built.
    """
    found, models = {}, {}
    left_out: dict[str, list[str]] = {}  # names by the reason
    for name in asked or METHODS:
        if name not in method_names() or name == "auto":
            known = (one for one in method_names() if one != "auto")
            raise UserError(f"method.methods={name} is unknown; choose among {', '.join(known)}")
        if name == BASELINE or (not asked and any(name in METHODS[other] for other in found)):
            continue  # it is always one of them, or another one is as fast
        config = method_config(name)
        kinds = artifact_kinds(config).values()
        is_chosen = asked or (kinds and all(kind in artifacts for kind in kinds))
        try:
            drafter = build_method(config, target, artifacts, sampling).arms[0].drafter
            if drafter.max_positions < target.max_positions and not is_chosen:
                raise UserError(f"the drafter's context holds {drafter.max_positions} tokens, the target's more")
        except UserError as error:
            if is_chosen:
                raise
            left_out.setdefault(str(error), []).append(name)
            continue
        model = getattr(drafter, "model", drafter)  # of a tree; its chain is of the same folder and options
        if name in METHODS and hasattr(model, "share") and models.setdefault(type(model), model) is not model:
            model.share(models[type(model)])
        found[name] = drafter
    for reason, without in left_out.items():
        log.info("without %s: %s", ", ".join(without), reason)
    drafter = Auto(found)
    kinds = {kind for name in found for kind in artifact_kinds(method_config(name)).values()}
    drafter.artifacts |= {kind: folder for kind, folder in artifacts.items() if kind in kinds}
    return drafter


def build_methods(
    command: Bench, methods: Mapping[str, DictConfig], target: TargetModel, sampling: Sampling
) -> tuple[dict[str, Drafter], dict[str, str]]:
    """Build the methods of `method_configs` with the artifacts that the command was given.

    Returns:
        The methods by name; and what `methods=all` leaves out for want of an artifact, with the reason.

    Raises:
        UserError: a method that was named has no artifact for this target, or an option is wrong.
    """
    given, built, skipped = given_artifacts(command.drafter, command.head, command.datastore), {}, {}
    for name, options in methods.items():
        kinds = artifact_kinds(options).values()
        may_lack = command.method is None and takes_all(command) and kinds and not given.keys() & set(kinds)
        try:
            built[name] = build_method(options, target, given, sampling)
        except UserError as error:
            if not may_lack:
                raise UserError(f"{name}: {error}") from error
            skipped[name] = str(error)
    check_taken(given, methods.values(), built.values(), by_baselines=["vanilla"] if command.peers else [])
    return built, skipped


def _drafter_of_head(head: str, target: TargetModel, artifacts: Mapping[str, str]) -> tuple[str, str]:
    """The kind and folder of a head's drafter: the given one, else the one inside, the one it was trained on, or the
    one that is found."""
    facts = read_head_facts(Path(head), fingerprint(target.model, target.tokenizer))
    kind, inside = facts.drafter.kind, own_drafter(head)
    if inside is not None:
        check_weights(inside, "drafter")
    recorded = inside or (facts.drafter.path if Path(facts.drafter.path).exists() else None)
    return kind, str(artifacts.get(kind) or recorded or find_artifact(kind, target))


def find_artifact(kind: str, target: TargetModel) -> str:
    """The best folder of this kind that fits, of those below `checkpoints/` and those that come with spectrain.

    Raises UserError where there is none.
    """
    print_ = fingerprint(target.model, target.tokenizer)
    if kind == "datastore":
        if target.tokenizer is None:
            raise UserError("a datastore is of a tokenizer, which this target does not have; give datastore=<folder>")
        folder = newest_datastore(CHECKPOINTS, tokenizer_fingerprint(target.tokenizer), print_)
    else:
        folder = default_artifact(CHECKPOINTS, kind, print_)
    log.info("%s: %s", about(kind).option, folder)
    return str(folder)


def build_given(
    method: DictConfig,
    target: TargetModel | None,
    folders: Mapping[str, str | Sequence[str] | None],
    sampling: Sampling | None = None,
    ranks: bool = True,
) -> Drafter:
    """Build one method with the folders that the user gave as `drafter`, `head` and `datastore`.

    Raises:
        UserError: see `build_method`; or the method does not take one of them.
    """
    kind, drafter = artifact_kinds(method).get("drafter"), folders.get("drafter")
    others = folders.get("head"), folders.get("datastore")
    if kind is not None and isinstance(drafter, str):  # whatever it is: the method says what is wrong with it
        given = given_artifacts(None, *others) | {kind: drafter}
    else:
        given = given_artifacts(drafter, *others)
    built = build_method(method, target, given, sampling, ranks)
    check_taken(given, [method], [built])
    return built


def build_configured(command: Generate | Responses, target: TargetModel, sampling: Sampling) -> Drafter:
    """Build the method of a command, see `build_given`."""
    folders = {"drafter": command.drafter, "head": command.head, "datastore": command.datastore}
    return build_given(OmegaConf.create(command.method), target, folders, sampling)
