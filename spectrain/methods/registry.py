"""Methods of `conf/method/` with the artifacts they draft from: which were given, which are found, how one is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import YAMLError

from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.decoding.budget import NodeBudget
from spectrain.decoding.errors import UserError
from spectrain.models.artifacts import MANIFEST, NOUNS, newest_artifact, option_of, read_manifest
from spectrain.models.head_artifact import own_drafter, read_head_facts
from spectrain.retrieval.datastore import newest_datastore
from spectrain.stores.budget_table import find_table
from spectrain.stores.locations import CHECKPOINTS, conf_dir

log = logging.getLogger(__name__)

AUTO = "auto"  # max_nodes=auto
BASELINE = "autoregressive"  # the method that all others are compared with


def method_config(name: str, max_nodes: int | str | None = None) -> DictConfig:
    """`conf/method/<name>.yaml`, with another node budget where one is given and the method has any.

    "auto" is for trees; a method that drafts a chain keeps its own length.
    """
    config = OmegaConf.load(conf_dir() / "method" / f"{name}.yaml")
    for base in config.pop("defaults", []):  # as Hydra composes it: another method with other options
        if base != "_self_":
            config = OmegaConf.merge(method_config(base), config)
    if max_nodes is not None and "max_nodes" in config and (max_nodes != AUTO or drafts_trees(config)):
        config.max_nodes = max_nodes
    return config


def method_configs(cfg: DictConfig, reserved: Collection[str] = ()) -> dict[str, DictConfig]:
    """Every method and variant that the config names, with its options; plain decoding first.

    Args:
        cfg: has `methods`, `variants`, `max_nodes`, `tuned`.
        reserved: names that a variant must not have.

    Raises:
        UserError: a name is neither a file of `conf/method/` nor a variant, or an option is none of the method's.
    """
    files = {path.stem: path for path in sorted((conf_dir() / "method").glob("*.yaml"))}
    known = list(dict.fromkeys([*files, *cfg.variants]))
    wanted = known if takes_all(cfg) else names(cfg.methods)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UserError(f"methods={unknown[0]} is unknown; choose among {', '.join(known)}, or all")
    taken = [name for name in cfg.variants if name in (BASELINE, *reserved)]
    if taken:
        raise UserError(f"variants.{taken[0]} has the name of what others are compared with; give it another name")
    found = {}
    for name in dict.fromkeys([BASELINE, *wanted]):
        changes = dict(cfg.variants.get(name) or {})
        base = changes.pop("method", name)
        if base not in files:
            raise UserError(f"variants.{name} has method={base}, which is unknown; choose among {', '.join(files)}")
        options = with_tuned(method_config(base, cfg.max_nodes), cfg.tuned)
        for key, value in changes.items():
            if key not in options or key.startswith("_"):
                takes = ", ".join(k for k in options if not k.startswith("_")) or "none"
                raise UserError(f"variants.{name}.{key} is no option of {base}; its options are {takes}")
            options[key] = value
        found[name] = options
    return found


def takes_all(cfg: DictConfig) -> bool:
    return "all" in names(cfg.methods)


def with_tuned(method: DictConfig, files: str | Sequence[str] | None) -> DictConfig:
    """A method with the options that files of `spectrain.tune` hold for it: {name: {option: value}}.

    The name is the method's module; where several methods share one, their yamls say it as `_tuned_`.

    Raises:
        UserError: a file is missing, no such yaml, or has an option that the method has not.
    """
    name = method.get("_tuned_") or method["_target_"].split(".")[-2]
    for file in [files] if isinstance(files, str) else files or ():
        try:
            found = OmegaConf.to_container(OmegaConf.load(file))
            changes = dict(found.get(name, {}))
        except (OSError, YAMLError, AttributeError, TypeError, ValueError) as error:
            line = str(error).splitlines()[0]
            raise UserError(f"tuned={file} is no file of spectrain.tune ({line}); run spectrain.tune again") from error
        unknown = [key for key in changes if key not in method or key.startswith("_")]
        if unknown:
            raise UserError(f"tuned={file} has {name}.{unknown[0]}, which is no option of the method; tune it again")
        method = OmegaConf.merge(method, changes)
    return method


def drafts_trees(method: DictConfig) -> bool:
    """Whether the method's yaml has a node budget that is not just the length of a chain."""
    return "max_nodes" in method and not any(length in method for length in ("gamma", "max_candidates"))


def node_budget(method: DictConfig, target: TargetModel, sampling: Sampling) -> NodeBudget:
    """What `max_nodes=auto` stands for: the measurements of `spectrain.tune`.

    Raises:
        UserError: the method drafts a chain, or was not measured with this target, machine and sampling.
    """
    if not drafts_trees(method):
        raise UserError(
            "max_nodes=auto sizes trees, but this method drafts a chain; give gamma or max_candidates in its place"
        )
    return find_table(CHECKPOINTS, target).budget(OmegaConf.to_container(method, resolve=True), sampling)


def given_artifacts(cfg: DictConfig) -> dict[str, str]:
    """The folders of `drafter=`, `head=` and `datastore=`, by kind.

    A drafter that is no export of ours is a plain Hugging Face model, so of kind vanilla.

    Raises:
        UserError: two drafters are of one kind.
    """
    given: dict[str, str] = {kind: cfg[kind] for kind in ("head", "datastore") if cfg.get(kind)}
    for folder in names(cfg.drafter):
        kind = read_manifest(Path(folder)).kind if (Path(folder) / MANIFEST).is_file() else "vanilla"
        if option_of(kind) != "drafter":
            raise UserError(f"drafter={folder} is of kind {kind}; give it as {option_of(kind)}={folder}")
        if kind in given:
            raise UserError(f"drafter={folder} and drafter={given[kind]} are both {kind} drafters; give one of a kind")
        given[kind] = folder
    return given


def check_taken(
    given: Mapping[str, str], methods: Mapping[str, DictConfig], built: Iterable[Drafter], by_peers: Iterable[str] = ()
) -> None:
    """Raises UserError where the user gave a folder that none of the methods, nor a peer, takes.

    Args:
        given: folders by kind.
        methods: the yamls of what was asked for, built or not.
        built: a head's method knows only then which kind of drafter it takes.
        by_peers: kinds.
    """
    taken = {options.get("_artifact_") for options in methods.values()} | set(by_peers)
    taken |= {kind for drafter in built for kind in drafter.artifacts}
    for kind in given.keys() - taken:
        raise UserError(
            f"{option_of(kind)}={given[kind]} is a {NOUNS[kind]}, which none of the methods takes; remove it"
        )


def names(value: str | ListConfig | None) -> list[str]:
    """An option that takes one name or a list of them."""
    return [value] if isinstance(value, str) else list(value or [])


def build_method(
    method: DictConfig, target: TargetModel, artifacts: Mapping[str, str], sampling: Sampling | None = None
) -> Drafter:
    """A method of `conf/method/` for this target.

    A yaml's `_target_` is a `build(target, ...)`; `_artifact_` says that it also takes the folder of a trained drafter
    of that kind, of a head and the drafter it was trained on, or of a datastore: by default the newest fitting one
    below `checkpoints/`.

    Args:
        method: the yaml's content.
        target: what is decoded.
        artifacts: folders that the user gave, by kind; those that the method does not take are left alone.
        sampling: what `max_nodes=auto` and heads are looked at for; None: greedy.

    Raises:
        UserError: the artifact is missing or does not fit.
    """
    options, sampling = dict(method), sampling or Sampling()
    if options.get("max_nodes") == AUTO:
        options["max_nodes"] = node_budget(method, target, sampling)
    kind = options.pop("_artifact_", None)
    options.pop("_tuned_", None)
    build = hydra.utils.get_method(options.pop("_target_"))
    if kind is None:
        return build(target, **options)
    # An option of the method's own stands before that of the command.
    folder = options.pop(kind, None) or artifacts.get(kind)
    if kind == "datastore":
        if folder is None and options.get("datastore_source", True):
            folder = find_datastore(target)
        return build(target, folder, **options)
    if kind == "head":
        return build_with_head(build, target, folder, artifacts, sampling, options)
    return build(target, folder or find_artifact(kind, target), **options)


def build_with_head(
    build: Callable[..., Drafter],
    target: TargetModel,
    folder: str | None,
    artifacts: Mapping[str, str],
    sampling: Sampling,
    options: dict,
) -> Drafter:
    """A method that takes a head, and the drafter that the head was trained on."""
    given = artifacts.get("head")
    if folder and given and folder != given:
        log.warning("the method's own head=%s stands before head=%s", folder, given)  # of a tuned file, or a variant
    folder = folder or find_artifact("head", target)
    facts = read_head_facts(Path(folder), fingerprint(target.model, target.tokenizer))
    recorded = own_drafter(folder) or (facts.drafter.path if Path(facts.drafter.path).exists() else None)
    drafter = str(artifacts.get(facts.drafter.kind) or recorded or find_artifact(facts.drafter.kind, target))
    method = build(target, folder, drafter, **options)
    method.artifacts = {"head": folder, facts.drafter.kind: drafter}
    method.warning = facts.why_off(folder, sampling)
    if method.warning:
        log.warning("%s", method.warning)
    return method


def find_artifact(kind: str, target: TargetModel) -> str:
    """The newest export of this kind below `checkpoints/` that fits. Raises UserError where there is none."""
    folder = newest_artifact(CHECKPOINTS, kind, fingerprint(target.model, target.tokenizer))
    log.info("%s: %s", option_of(kind), folder)
    return str(folder)


def find_datastore(target: TargetModel) -> str:
    """The newest datastore below `checkpoints/` that fits. Raises UserError where there is none."""
    prints = tokenizer_fingerprint(target.tokenizer), fingerprint(target.model, target.tokenizer)
    folder = newest_datastore(CHECKPOINTS, *prints)
    log.info("datastore: %s", folder)
    return str(folder)


def build_configured(cfg: DictConfig, target: TargetModel, sampling: Sampling) -> Drafter:
    """The one method of a command's config: `method`, `tuned`, and the artifacts that it was given.

    Raises:
        UserError: see `with_tuned`, `build_method`; or something was given that the method does not take.
    """
    given, kind = given_artifacts(cfg), cfg.method.get("_artifact_")
    if kind in ("spire", "vanilla") and isinstance(cfg.drafter, str):  # whatever it is: the method says what is wrong
        given = {other: folder for other, folder in given.items() if folder != cfg.drafter} | {kind: cfg.drafter}
    drafter = build_method(with_tuned(cfg.method, cfg.tuned), target, given, sampling)
    check_taken(given, {"this method": cfg.method}, [drafter])
    return drafter
