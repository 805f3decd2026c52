"""Every method by its name: one yaml in `conf/method/` and one file in this package.

`generate`, `bench`, exports, serving and the tests find methods here and nowhere else. A yaml holds the options
of the method's `build(target, ...)`, which `_target_` names, and what others must know of the method:

    _artifact_: spire | vanilla | head | datastore    the folder that `build` takes besides
    _more_: datastore                                 a folder that it takes besides, where there is one
    _nodes_: 64                                       the paper's `max_nodes`; without it: all, or gamma + 1
    _ranks_: false                                    guesses are scored in the method's own order, see `LookupDrafter`
    _chooses_: true                                   `build` takes other methods, by name

Every `build` raises UserError where options contradict each other, or a folder is missing, damaged or does not fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.errors import UserError
from spectrain.methods.auto import METHODS, Auto
from spectrain.methods.lookup import LookupDrafter
from spectrain.methods.sizing import AUTO
from spectrain.models.artifacts import check_weights, decoded_by, is_export, newest_artifact, read_manifest
from spectrain.models.head import own_drafter, read_head_facts
from spectrain.models.kinds import about
from spectrain.retrieval.datastore import newest_datastore
from spectrain.stores.locations import CHECKPOINTS, conf_dir
from spectrain.stores.options import check_method_options

log = logging.getLogger(__name__)

PAPER = "paper"  # max_nodes=paper
BASELINE = "autoregressive"  # the method that all others are compared with


def method_names() -> list[str]:
    """All methods of `conf/method/`, in alphabetical order."""
    return sorted(file.stem for file in (conf_dir() / "method").glob("*.yaml"))


def method_config(name: str, max_nodes: int | str | None = None) -> DictConfig:
    """Read `conf/method/<name>.yaml`, with another node budget where one is given and the method has a budget.

    "paper" is that of its paper. A number is for trees: a method that drafts a chain keeps its own length.
    """
    config = OmegaConf.load(conf_dir() / "method" / f"{name}.yaml")
    for base in config.pop("defaults", []):  # as Hydra composes it: another method with other options
        if base != "_self_":
            config = OmegaConf.merge(method_config(base), config)
    return with_nodes(config, max_nodes)


def with_nodes(method: DictConfig, max_nodes: int | str | None) -> DictConfig:
    """Return the method with another node budget; see `method_config`."""
    if max_nodes == PAPER:
        return with_papers_nodes(method)
    if max_nodes is not None and "max_nodes" in method and (max_nodes == AUTO or drafts_trees(method)):
        return OmegaConf.merge(method, {"max_nodes": max_nodes})
    return method


def with_papers_nodes(method: DictConfig) -> DictConfig:
    """A method that drafts as many tokens as in its paper, and in its order, where its `max_nodes` is auto."""
    papers = {"max_nodes": method.get("_nodes_"), "_ranks_": False}
    return OmegaConf.merge(method, papers) if method.get("max_nodes") == AUTO else method


def method_configs(cfg: DictConfig, reserved: Collection[str] = ()) -> dict[str, DictConfig]:
    """Every method, variant and exported folder that the config names, with its options; plain decoding first.

    Args:
        cfg: has `methods`, `variants`, `max_nodes`.
        reserved: names that a variant must not have.

    Raises:
        UserError: a name is neither a file of `conf/method/`, a variant nor an exported folder, or an option is none of
            the method's.
    """
    taken = [name for name in cfg.variants if name in (BASELINE, *reserved)]
    if taken:
        raise UserError(f"variants.{taken[0]} has the name of what others are compared with; give it another name")
    files = method_names()
    known = list(dict.fromkeys([*files, *cfg.variants]))
    found = {}
    for name in dict.fromkeys([BASELINE, *(known if takes_all(cfg) else names(cfg.methods))]):
        changes, exported = dict(cfg.variants.get(name) or {}), {}
        base = changes.pop("method", name)
        if name not in known:
            if not is_export(name):
                raise UserError(f"methods={name} is unknown; choose among {', '.join(known)}, or all; or give a folder")
            base, exported = decoded_by(Path(name))
        if base not in files:
            raise UserError(f"variants.{name} has method={base}, which is unknown; choose among {', '.join(files)}")
        options = method_config(base, cfg.max_nodes)
        found[name] = OmegaConf.merge(with_options(options, changes, base, f"variants.{name}."), exported)
    return found


def takes_all(cfg: DictConfig) -> bool:
    return "all" in names(cfg.methods)


def build_function(method: Mapping) -> Callable[..., Drafter]:
    """The function that a yaml's `_target_` names."""
    return hydra.utils.get_method(method["_target_"])


def plain_options(method: Mapping) -> dict:
    """The options of `build` in a yaml: all but what describes the method."""
    return {key: value for key, value in method.items() if not key.startswith("_")}


def with_options(method: DictConfig, changes: Mapping, name: str, where: str = "") -> DictConfig:
    """A method with some of its options changed. Raises UserError where it has no such option, or a value is wrong.

    `name` is what the method is called, and `where` what stands before an option that the user has typed.
    """
    for key in changes:
        if key not in method or key.startswith("_"):
            takes = ", ".join(plain_options(method)) or "none"
            raise UserError(f"{where}{key} is not an option of {name}; its options are {takes}")
    check_method_options(OmegaConf.to_container(OmegaConf.create(dict(changes))), where)
    return OmegaConf.merge(method, changes)


def drafts_trees(method: DictConfig) -> bool:
    """Whether the method's yaml has a node budget that is not just the length of a chain."""
    return "max_nodes" in method and not any(length in method for length in ("gamma", "max_candidates"))


def names(value: str | float | ListConfig | Sequence[str | float] | None) -> list:
    """The values of an option that takes one name or number, or a list of them."""
    return [value] if isinstance(value, str | float | int) else list(value or [])


def kind_of_drafter(folder: str | Path) -> str:
    """The kind of a folder given as drafter=. What is not one of our exports is a plain Hugging Face model: vanilla."""
    return read_manifest(Path(folder)).kind if is_export(folder) else "vanilla"


def given_artifacts(cfg: DictConfig) -> dict[str, str]:
    """The folders of `drafter=`, `head=` and `datastore=`, by kind. Raises UserError where two are of one kind."""
    given: dict[str, str] = {kind: cfg[kind] for kind in ("head", "datastore") if cfg.get(kind)}
    for folder in names(cfg.drafter):
        kind = kind_of_drafter(folder)
        option = about(kind).option
        if option != "drafter":
            raise UserError(f"drafter={folder} is of kind {kind}; give it as {option}={folder}")
        if kind in given:
            raise UserError(f"drafter={folder} and drafter={given[kind]} are both {kind} drafters; give one per kind")
        given[kind] = folder
    return given


def check_taken(
    given: Mapping[str, str],
    methods: Mapping[str, DictConfig],
    built: Iterable[Drafter],
    by_baselines: Iterable[str] = (),
) -> None:
    """Raise UserError where the user gave a folder that none of the methods, nor a baseline, takes.

    Args:
        given: folders by kind.
        methods: the yamls of what was asked for, built or not.
        built: the built methods: only then is it known which kind of drafter a head takes.
        by_baselines: kinds.
    """
    taken = {options.get(key) for options in methods.values() for key in ("_artifact_", "_more_")} | set(by_baselines)
    taken |= {kind for drafter in built for kind in drafter.artifacts}
    for kind in given.keys() - taken:
        one = about(kind)
        raise UserError(f"{one.option}={given[kind]} is a {one.noun}, which none of the methods takes; remove it")


def build_method(
    method: DictConfig,
    target: TargetModel | None,
    artifacts: Mapping[str, str] | None = None,
    sampling: Sampling | None = None,
) -> Drafter:
    """Build a method of `conf/method/` for this target.

    A method that takes an artifact (see the top of this file) gets the folder that its own options name by this kind,
    else the one that the user gave, else the newest fitting one below `checkpoints/`.

    Args:
        method: the yaml's content.
        target: what is decoded; None: a serving engine's, of which nothing is at hand but the tokens.
        artifacts: folders that the user gave, by kind; those that the method does not take are left alone.
        sampling: for which heads are looked up; None: not known yet, so no head is said to be of another one.

    Raises:
        UserError: the artifact is missing or does not fit.
    """
    if method.get("_chooses_"):
        found = _to_choose_from(method, target, artifacts or {}, sampling)
        drafter = build_function(method)(target, found, METHODS if method.methods is None else {})
        drafter.target = target
        kinds = {method_config(arm.name).get(key) for arm in drafter.arms for key in ("_artifact_", "_more_")}
        drafter.artifacts |= {kind: folder for kind, folder in (artifacts or {}).items() if kind in kinds}
        return drafter
    if target is None:  # whose forwards cannot be timed
        method = with_papers_nodes(method)
    options, kind = plain_options(method), method.get("_artifact_")
    artifacts = {} if artifacts is None else artifacts
    chooses = options.get("max_nodes") == AUTO and options.get("gamma") is None
    build, folder = build_function(method), None
    if kind is not None:
        own, given = options.pop(about(kind).option, None), artifacts.get(kind)
        if own and given and own != given:  # of a variant or an exported folder
            log.warning("the method's own %s=%s is used instead of %s", kind, own, given)
        folder = own or given
        if folder is None and options.get("datastore_source", True):
            folder = find_artifact(kind, target)
    if (more := method.get("_more_")) and options[more] == AUTO:
        options[more] = artifacts.get(more) or _at_hand(more, target)
    if kind is None:
        drafter = build(target, **options)
    elif kind == "head":
        drafter = _build_with_head(build, target, folder, options, artifacts, sampling)
    else:
        drafter = build(target, folder, **options)
    is_fixed = target is not None and type(options.get("max_nodes")) is int
    if is_fixed and isinstance(drafter, LookupDrafter) and method.get("_ranks_", True):
        drafter.rank()
    if chooses:
        drafter = Auto({method["_target_"].split(".")[-2]: drafter})
    drafter.target = target
    return drafter


def _to_choose_from(
    method: DictConfig, target: TargetModel, artifacts: Mapping[str, str], sampling: Sampling | None
) -> dict[str, Drafter]:
    """The methods that method=auto runs: those that it names; else all of METHODS that can be built.

    Raises:
        UserError: one that is named, or whose folder was given, cannot be built.
    """
    asked, found, models = names(method.methods), {}, {}
    left_out: dict[str, list[str]] = {}  # names by the reason
    for name in asked or METHODS:
        if name not in method_names() or method_config(name).get("_chooses_"):
            known = (one for one in method_names() if not method_config(one).get("_chooses_"))
            raise UserError(f"method.methods={name} is unknown; choose among {', '.join(known)}")
        if name == BASELINE or (not asked and any(name in METHODS[other].always for other in found)):
            continue  # it is always one of them, or another one is as fast
        config = method_config(name)
        is_chosen = asked or config.get("_artifact_") in artifacts
        try:
            built = build_method(config, target, artifacts, sampling)
        except UserError as error:
            if is_chosen:
                raise
            left_out.setdefault(str(error), []).append(name)
            continue
        drafter = built.arms[0].drafter
        if drafter.max_positions < target.max_positions and not is_chosen:
            reason = f"the drafter's context holds {drafter.max_positions} tokens, the target's more"
            left_out.setdefault(reason, []).append(name)
            continue
        model = getattr(drafter, "model", drafter)  # of a tree; its chain is of the same folder and options
        if name in METHODS and hasattr(model, "share") and models.setdefault(type(model), model) is not model:
            model.share(models[type(model)])
        found[name] = drafter
    for reason, without in left_out.items():
        log.info("without %s: %s", ", ".join(without), reason)
    return found


def build_methods(
    cfg: DictConfig, methods: Mapping[str, DictConfig], target: TargetModel, sampling: Sampling
) -> tuple[dict[str, Drafter], dict[str, str]]:
    """Build the methods of `method_configs` with the artifacts that the command was given.

    Returns:
        The methods by name; and what `methods=all` leaves out for want of an artifact, with the reason.

    Raises:
        UserError: a method that was named has no artifact for this target, or an option is wrong.
    """
    given, built, skipped = given_artifacts(cfg), {}, {}
    for name, options in methods.items():
        kind = options.get("_artifact_")
        try:
            built[name] = build_method(options, target, given, sampling)
        except UserError as error:
            if cfg.get("method") is not None or not takes_all(cfg) or kind is None or kind in given:
                raise UserError(f"{name}: {error}") from error
            skipped[name] = str(error)
    check_taken(given, methods, built.values(), by_baselines=["vanilla"] if cfg.peers else [])
    return built, skipped


def _build_with_head(
    build: Callable[..., Drafter],
    target: TargetModel,
    folder: str,
    options: dict,
    artifacts: Mapping[str, str],
    sampling: Sampling | None,
) -> Drafter:
    """Build a method from a head and its drafter: the given one, else the one inside, the one it was trained on, or
    the newest."""
    facts = read_head_facts(Path(folder), fingerprint(target.model, target.tokenizer))
    kind, inside = facts.drafter.kind, own_drafter(folder)
    if inside is not None:
        check_weights(inside, "drafter")
    recorded = inside or (facts.drafter.path if Path(facts.drafter.path).exists() else None)
    drafter = str(artifacts.get(kind) or recorded or find_artifact(kind, target))
    method = build(target, folder, drafter, **options)
    method.artifacts = {"head": folder, kind: drafter}
    method.warning = facts.why_off(folder, sampling) if sampling is not None else None
    if method.warning:
        log.warning("%s", method.warning)
    return method


def find_artifact(kind: str, target: TargetModel) -> str:
    """The newest folder of this kind below `checkpoints/` that fits, else the one that comes with spectrain.

    Raises UserError where there is neither.
    """
    print_ = fingerprint(target.model, target.tokenizer)
    if kind == "datastore":
        if target.tokenizer is None:
            raise UserError("a datastore is of a tokenizer, which this target does not have; give datastore=<folder>")
        folder = newest_datastore(CHECKPOINTS, tokenizer_fingerprint(target.tokenizer), print_)
    else:
        folder = newest_artifact(CHECKPOINTS, kind, print_)
    log.info("%s: %s", about(kind).option, folder)
    return str(folder)


def _at_hand(kind: str, target: TargetModel) -> str | None:
    """`find_artifact`, or None where there is none."""
    try:
        return find_artifact(kind, target)
    except UserError as error:
        log.info("%s", error)
        return None


def build_configured(cfg: DictConfig, target: TargetModel, sampling: Sampling) -> Drafter:
    """The one method of a command's config: `method`, and the artifacts that it was given.

    Raises:
        UserError: see `build_method`; or something was given that the method does not take.
    """
    given, kind = given_artifacts(cfg), cfg.method.get("_artifact_")
    if kind in ("spire", "vanilla") and isinstance(cfg.drafter, str):  # whatever it is: the method says what is wrong
        given = {other: folder for other, folder in given.items() if folder != cfg.drafter} | {kind: cfg.drafter}
    drafter = build_method(cfg.method, target, given, sampling)
    check_taken(given, {"this method": cfg.method}, [drafter])
    return drafter
