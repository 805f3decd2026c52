"""What every command shares: where `conf/` lies, short overrides, errors as one sentence, targets and methods.

`target=<folder or hub id>` is short for `target.path=...`; the same holds for the other names of `SHORTHANDS`, unless
the value names a file of that Hydra group (`corpus=stdlib`).
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import hydra
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from yaml import YAMLError

from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint, load_target, tokenizer_fingerprint
from spectrain.decoding.budget import NodeBudget
from spectrain.errors import UserError
from spectrain.evaluation.budget_table import find_table
from spectrain.models.artifacts import MANIFEST, NOUNS, newest_artifact, option_of, read_manifest
from spectrain.models.head_artifact import read_head_facts
from spectrain.retrieval.datastore import newest_datastore

log = logging.getLogger(__name__)

CHECKPOINTS = Path("checkpoints")  # where commands export to and look for drafters, below the working folder
PACKAGE = Path(__file__).resolve().parent
AUTO = "auto"  # max_nodes=auto
FREE_TEXT = ("prompt", "lookup")
SHORTHANDS = {"target": "target.path", "corpus": "corpus.path"}


def conf_dir() -> Path:
    """The folder of Hydra configs: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


def bundled_folder(name: str) -> Path | None:
    """Where a bundled checkpoint of this name lies (wheel or checkout), or None."""
    for root in (PACKAGE / "checkpoints", PACKAGE.parent / "checkpoints"):
        if "/" not in name and (root / name / "config.json").is_file():
            return root / name
    return None


def expand_shorthands(arguments: list[str], samples: bool = True) -> list[str]:
    """Rewrites `target=X` to `target.path=X` where X is no option of the config group `target`.

    `samples`: the command has sampling options.
    """
    expanded = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in FREE_TEXT:
            argument = f"{key}={quoted(value)}"
        elif key in SHORTHANDS and value not in ("", "null") and not (conf_dir() / key / f"{value}.yaml").is_file():
            argument = f"{SHORTHANDS[key]}={value}"
        elif samples and key.startswith("sampling."):
            argument = f"++{argument}"  # Hydra would send an unknown option away before we can say why
        expanded.append(argument)
    return expanded


def quoted(text: str) -> str:
    """Text as Hydra's override grammar takes it whole: parentheses, colons and dollars are its syntax otherwise."""
    text = text.replace("${", "\\${")  # no interpolation
    return '"' + re.sub(r'(\\*)("|$)', lambda m: 2 * m[1] + ("\\" + m[2] if m[2] else ""), text) + '"'


def command(config_name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Makes `main(cfg)` a command: composes `conf/<config_name>.yaml` and turns a UserError into exit code 2."""

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        def guarded(cfg: DictConfig) -> None:
            quiet_libraries()
            try:
                main(cfg)
            except UserError as error:  # exit code 2, as of any command that was used wrongly
                print(f"error: {error}", file=sys.stderr)
                raise SystemExit(2) from None
            except MissingMandatoryValue as error:
                print(f"error: {error.full_key} is missing; give {error.full_key}=...", file=sys.stderr)
                raise SystemExit(2) from None
            finally:
                if "wandb" in sys.modules:  # in a multirun each job is a W&B run of its own
                    sys.modules["wandb"].finish()

        def run() -> None:
            samples = "- sampling:" in (conf_dir() / f"{config_name}.yaml").read_text()
            sys.argv[1:] = expand_shorthands(sys.argv[1:], samples)
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=config_name)(guarded)()

        return run

    return decorate


def in_multirun() -> bool:
    """Whether this is one job of Hydra's `-m`."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def quiet_libraries() -> None:
    """Leaves the terminal to the command: no tips, device reports and weight-loading bars of the libraries."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")


def open_target(cfg: DictConfig, device: str | None = None) -> TargetModel:
    """The target of a config's `target` node, on `device` where given; a bare name may be a bundled checkpoint."""
    path = cfg.target.path
    device = device or cfg.target.device
    return load_target(bundled_folder(path) or path, cfg.target.dtype, device, cfg.target.parallel)


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


def check_taken(given: Mapping[str, str], methods: Mapping[str, DictConfig], taken_by_peers: set[str]) -> None:
    """Raises UserError where the user gave a folder that none of the methods takes."""
    taken = {options.get("_artifact_") for options in methods.values()} | taken_by_peers
    if "head" in taken:  # and the drafter it was trained on
        taken |= {"vanilla", "spire"}
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
    folder = folder or find_artifact("head", target)
    facts = read_head_facts(Path(folder), fingerprint(target.model, target.tokenizer))
    recorded = facts.drafter.path if Path(facts.drafter.path).exists() else None
    drafter = artifacts.get(facts.drafter.kind) or recorded or find_artifact(facts.drafter.kind, target)
    method = build(target, folder, drafter, **options)
    if sampling != facts.sampling:
        method.warning = (
            f"head={folder} was trained for {facts.sampling.describe()} and is used for {sampling.describe()}: its "
            "probabilities are those of another acceptance"
        )
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
