"""Every method by its name: one yaml in `conf/method/` and one file in this package.

    target = spectrain.load_target()
    method = load_method("pld", target)                 # a name of conf/method/
    method = load_method("exported/spire", target)      # a folder of spectrain.train or spectrain.export
    generations = generate(target, method, prompts, max_new_tokens=64, batch_size=8)    # of spectrain.decoding

`generate`, `bench`, exports, serving and the tests find methods here and nowhere else. The `_target_` of a yaml is a
class or function that builds the method, and the rest of the yaml are its options. Its signature says what it takes:
the target, where it has a parameter `target`; folders, where it has `drafter`, `head` or `datastore`; and the options
with their types (`options.py`). The default of `max_nodes` is that of the paper; None: all, or gamma + 1. The module
may say more by two constants:

    DRAFTER = "spire"      the kind of its drafter (`models/kinds.py`); trees have an option `tree` for it
    TOKENS_ONLY = True     it drafts from tokens alone, so that a serving engine can run it

Every builder raises UserError where options contradict each other, or a folder is missing, damaged or does not fit.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spectrain.config import conf_dir
from spectrain.config.groups import Configured
from spectrain.data.turns import clean
from spectrain.decoding import Drafter, Sampling
from spectrain.drafting.budget import AUTO
from spectrain.drafting.lookup import LookupDrafter
from spectrain.errors import NoneFitsError, UserError, nearest, shown
from spectrain.methods.auto import Auto, candidates
from spectrain.methods.options import (
    FOLDERS,
    artifact_kinds,
    build_function,
    check_options,
    check_taken,
    chosen_folder,
    given_artifacts,
    module_of,
    names,
    option_types,
    plain_options,
)
from spectrain.models.artifacts import (
    check_artifact,
    check_tokenizer,
    check_weights,
    decoded_by,
    is_export,
    read_lookup_facts,
    read_manifest,
)
from spectrain.models.head import read_head_facts
from spectrain.stores.folder import digest
from spectrain.target import TargetModel, fingerprint, tokenizer_fingerprint

log = logging.getLogger(__name__)

PAPER = "paper"  # max_nodes=paper
BASELINE = "autoregressive"  # the method that all others are compared with
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes of a file's name, and of its path


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


def method_configs(
    asked: str | Sequence[str], variants: Mapping, max_nodes: int | str | None = None, reserved: Collection[str] = ()
) -> dict[str, DictConfig]:
    """Every method, variant and exported folder that is asked for, with its options; plain decoding first.

    No variant may have one of the `reserved` names.

    Raises:
        UserError: a name is neither a file of `conf/method/`, a variant nor an exported folder, or an option is none of
            the method's.
    """
    taken = [name for name in variants if name in (BASELINE, *reserved)]
    if taken:
        raise UserError(f"variants.{taken[0]} has the name of what others are compared with; give it another name")
    files = method_names()
    known = list(dict.fromkeys([*files, *variants]))
    found = {}
    for name in dict.fromkeys([BASELINE, *(known if takes_all(asked) else names(asked))]):
        changes, exported = dict(variants.get(name) or {}), {}
        base = changes.pop("method", name)
        if name in known:
            say_if_folder(name)
        else:
            if not is_export(name):
                near = nearest(name, known)
                raise UserError(
                    f"methods={name} is unknown{near}; choose among {', '.join(known)}, or all; or give a folder"
                )
            base, exported = decoded_by(Path(name))
        if base not in files:
            raise UserError(f"variants.{name} has method={base}, which is unknown; choose among {', '.join(files)}")
        own = dict(variants.get(base) or {})  # of a changed method, on which other variants stand
        if own.pop("method", base) == base:
            changes = own | changes
        options = method_config(base, max_nodes)
        check_options(build_function(options), changes, base, f"variants.{name}.")
        found[name] = OmegaConf.merge(options, changes, exported)
    return found


def say_if_folder(name: str) -> None:
    """Say in the log that a name means the method where an exported folder here has it, too."""
    if is_export(name):
        log.warning("%s is a method and a folder here: the method is taken; ./%s is the folder", name, name)


def takes_all(asked: str | Sequence[str]) -> bool:
    return "all" in names(asked)


def instantiate(method: Mapping, target: TargetModel | None, options: Mapping) -> Drafter:
    """Call what a yaml's `_target_` names with these options, and with the target where it takes one."""
    create = hydra.utils.instantiate({"_target_": method["_target_"], **options}, _partial_=True, _convert_="all")
    return create(target) if "target" in inspect.signature(build_function(method)).parameters else create()


def build_method(
    method: DictConfig, target: TargetModel | None, artifacts: Mapping[str, str] | None = None, ranks: bool = True
) -> Drafter:
    """Build a method of `conf/method/` for this target, with its folders; see `chosen_folder`.

    Args:
        method: the yaml's content.
        target: what is decoded; None: a serving engine's, of which nothing is at hand but the tokens.
        artifacts: folders that the user gave, by kind; those that the method does not take are left alone.
        ranks: whether a lookup with a fixed number of nodes scores the likeliest candidates, and not the first in its
            own order, as "paper" does in any case.

    Raises:
        UserError: an option is unknown or out of range, or a folder is missing or does not fit.
    """
    artifacts, build = {} if artifacts is None else artifacts, build_function(method)
    name = module_of(method).__name__.rpartition(".")[2]
    if target is None:  # whose steps nobody clocks
        method = with_papers_nodes(method)
    options = plain_options(method)
    given = {key: value for key, value in options.items() if value is not None or key not in FOLDERS}
    check_options(build, given, name)
    if build is Auto:
        return _build_auto(names(options.get("methods")), target, artifacts)
    nodes = options.get("max_nodes")
    chooses = nodes == AUTO and options.get("gamma") is None
    ranks = ranks and target is not None and type(nodes) is int
    if nodes == PAPER:
        del options["max_nodes"]
    kinds = artifact_kinds(method)
    for option, kind in kinds.items():
        options[option] = chosen_folder(option, kind, options.get(option), artifacts.get(kind), target)
    if "datastore" not in kinds and "datastore" in option_types(build):
        options["datastore"] = None
    if "head" in kinds:  # whose drafter may be of any kind
        facts = read_head_facts(Path(options["head"]), fingerprint(target.model, target.tokenizer))
        options["drafter"] = artifacts.get(facts.drafter.kind)
    drafter = instantiate(method, target, options)
    if ranks and isinstance(drafter, LookupDrafter):
        drafter.rank()
    used = tuple(str(options[option]) for option in FOLDERS if options.get(option))
    drafter.describe(name=f"{name}-{digest(options)}", folders=used, target=target)
    return Auto({name: drafter}, target) if chooses else drafter


def _build_auto(asked: Sequence[str], target: TargetModel, artifacts: Mapping[str, str]) -> Auto:
    """Build method=auto over the methods that it names; else over all of `auto.candidates` that can be built.

    Raises:
        UserError: one that is named, or whose folder was given, cannot be built.
    """
    found, models, known_best = {}, {}, candidates()
    left_out: dict[str, list[str]] = {}  # names by the reason
    for name in asked or known_best:
        if name not in method_names() or name == "auto":
            known = [one for one in method_names() if one != "auto"]
            raise UserError(f"method.methods={name} is unknown; choose among {', '.join(known)}{nearest(name, known)}")
        if name == BASELINE or (not asked and any(name in known_best[other] for other in found)):
            continue  # it is always one of them, or another one is as fast
        config = method_config(name)
        kinds = artifact_kinds(config).values()
        is_chosen = asked or (kinds and all(kind in artifacts for kind in kinds))
        try:
            drafter = build_method(config, target, artifacts).arms[0].drafter
            if (longest := drafter.method.max_positions) < target.max_positions and not is_chosen:
                raise UserError(f"the drafter's context holds {longest} tokens, the target's more")
        except UserError as error:
            if is_chosen:
                raise
            missing = isinstance(error, NoneFitsError)  # of which kinds, the names say
            left_out.setdefault("no such drafter of this target was found" if missing else str(error), []).append(name)
            continue
        model = getattr(drafter, "model", drafter)  # of a tree; its chain is of the same folder and options
        if name in known_best and hasattr(model, "share") and models.setdefault(type(model), model) is not model:
            model.share(models[type(model)])
        found[name] = drafter
    for reason, without in left_out.items():
        log.info("without %s: %s", ", ".join(without), reason)
    kinds = {kind for name in found for kind in artifact_kinds(method_config(name)).values()}
    return Auto(found, target, {kind: folder for kind, folder in artifacts.items() if kind in kinds})


def build_methods(
    methods: Mapping[str, DictConfig], given: Mapping, target: TargetModel, may_lack: bool, by_baselines: Sequence = ()
) -> tuple[dict[str, Drafter], dict[str, str]]:
    """Build the methods of `method_configs` with the artifacts that the user gave, by kind; see `check_taken`.

    Returns:
        The methods by name; and what is left out, if it `may_lack` an artifact, with the reason.

    Raises:
        UserError: a method that was named has no artifact for this target, or an option is wrong.
    """
    built, skipped = {}, {}
    for name, options in methods.items():
        try:
            built[name] = build_method(options, target, given)
        except UserError as error:
            if not (may_lack and {*artifact_kinds(options).values()} - given.keys()):
                raise UserError(f"{name}: {error}") from error
            skipped[name] = str(error)
    check_taken(given, methods.values(), built.values(), by_baselines)
    return built, skipped


def build_given(
    method: Mapping,
    target: TargetModel | None,
    folders: Mapping[str, str | Sequence[str] | None],
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
    built = build_method(method, target, given, ranks)
    check_taken(given, [method], [built])
    return built


def build_configured(
    asked: Configured, target: TargetModel, sampling: Sampling, verification: str = "block"
) -> Drafter:
    """Build the method that a command was asked for, see `build_given`."""
    folders = {option: getattr(asked, option) for option in FOLDERS}
    return warned(build_given(OmegaConf.create(asked.method), target, folders), sampling, verification)


def warned(drafter: Drafter, sampling: Sampling, verification: str) -> Drafter:
    """Say in the log what a user of this method must know under this sampling and verification."""
    if warning := drafter.method.warning(sampling, verification):
        log.warning("%s", warning)
    return drafter


def token_methods() -> list[str]:
    """Methods that draft from tokens alone: what an engine can give its proposers."""
    modules = {name: module_of(method_config(name)) for name in method_names()}
    return [name for name, module in modules.items() if getattr(module, "TOKENS_ONLY", False)]


def load_method(source: str | Path, target: TargetModel, **options: object) -> Drafter:
    """Open a method by its name, or an exported folder as the method that decodes with it.

    Args:
        source: a name of `conf/method/`, or a folder of kind spire, vanilla, head or lookup.
        target: what is decoded.
        options: of the method, as in conf/method/: gamma, max_nodes (a number, "auto" or "paper"), threshold, ...;
            those of a lookup method replace the ones that it was exported with. `drafter`, `head` and `datastore` name
            folders; `auto` takes several drafters as a list.

    Raises:
        UserError: there is no such method or folder, the folder is damaged or of another version, was made for another
            target or tokenizer, or the method has no such option.
    """
    name = name_of("method", source)
    if name in method_names():
        say_if_folder(name)
        return _built(method_config(name), target, options)
    if Path(name).name == name and not Path(name).is_dir():
        raise UserError(f"method {name} is unknown; give a folder, or one of {', '.join(method_names())}")
    return open_export(Path(name), target, options)


def name_of(option: str, value: object) -> str:
    """Return a name or path as text. Raise UserError where it is none, or longer than a file system allows."""
    text = clean(str(value)) if isinstance(value, str | Path) else ""
    is_long = any(len(part.encode()) > LONGEST_NAME for part in Path(text).parts)
    if not text or is_long or len(text.encode()) > LONGEST_PATH:
        raise UserError(f"{option}={shown(value)} must be a name or a path")
    return text


def open_export(folder: Path, target: TargetModel | None, options: Mapping = MappingProxyType({})) -> Drafter:
    """Open the method that decodes with an exported folder; see `load_method`.

    `target`: what is decoded; None: a serving engine's, whose tokenizer was compared with that of a lookup method.
    """
    name, own = decoded_by(folder)
    kind = read_manifest(folder).kind
    if kind == "lookup" and name not in token_methods():
        raise UserError(f"{folder} holds the method {name}, which is none of {', '.join(token_methods())}")
    if kind == "lookup" and target is not None:
        facts = read_lookup_facts(folder)
        if target.tokenizer is not None:
            check_tokenizer(folder, facts, tokenizer_fingerprint(target.tokenizer), target.model.name_or_path)
        if target.vocab_size < facts.vocab_size:
            raise UserError(
                f"{folder} has tokens up to {facts.vocab_size}, but the target has a vocabulary of "
                f"{target.vocab_size}; export one for it with spectrain export method=... target=..."
            )
    if kind == "vanilla":  # the others are checked where they are built
        check_artifact(folder, kind, fingerprint(target.model, target.tokenizer))
        check_weights(folder, "drafter")
    kept = ("_target_", "max_nodes", "tree") if kind != "lookup" else ("_target_",)
    described = {key: value for key, value in method_config(name).items() if key in kept}
    # An exported lookup drafts what the serving engine drafts: the first candidates in its own order.
    return _built(OmegaConf.create(described | own), target, options, ranks=kind != "lookup")


def _built(method: DictConfig, target: TargetModel | None, options: Mapping, ranks: bool = True) -> Drafter:
    """Build a method with other options: folders take the place of those that it names itself."""
    given = {name: options[name] for name in FOLDERS if options.get(name) is not None}
    takes = option_types(build_function(method))
    others = {name: value for name, value in options.items() if name not in FOLDERS}
    others |= {name: AUTO for name in given if name in takes}
    has_several = isinstance(given.get("drafter"), list | tuple)
    folders = {name: name_of(name, one) for name, one in given.items() if name != "drafter" or not has_several}
    folders |= {"drafter": [name_of("drafter", one) for one in given["drafter"]]} if has_several else {}
    try:
        method = OmegaConf.merge(method, others)
    except OmegaConfBaseException as error:  # a value such as a tensor
        raise UserError(f"{error.full_key}={shown(options.get(error.full_key))} must be a plain value") from error
    return build_given(method, target, folders, ranks=ranks)
