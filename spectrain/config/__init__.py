"""The options of commands, typed. A command is a dataclass in `COMMANDS`.

Hydra composes its values from the defaults of the class, from the presets in `conf/`, and from what was typed. `typed`
turns them into an object of the class before the command works. The options of a method stand in its yaml, and its
`build` checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from spectrain.config import commands, training
from spectrain.config.fields import described, plain, typed, types_by_name, types_of
from spectrain.config.groups import Artifacts, Corpus, Sampling, Target
from spectrain.config.values import PATH, parts_of

__all__ = ["COMMANDS", "GROUPS", "Target", "conf_dir", "described", "options_of", "paths_of", "plain", "register"]

PACKAGE = Path(__file__).resolve().parent.parent

# The command line of this process as it was typed; results keep it.
TYPED_COMMAND: ContextVar[str | None] = ContextVar("typed_command", default=None)

# The class of each command, and the groups that it is composed from, with the file of conf/ that is taken by default.
COMMANDS: dict[str, tuple[type, dict[str, str | None]]] = {
    "generate": (commands.Generate, {"target": "default", "method": training.SUGGESTED, "sampling": "greedy"}),
    "chat": (commands.Chat, {"target": "default", "method": "auto", "sampling": "greedy"}),
    "serve": (commands.Serve, {"target": "default", "sampling": "t1"}),
    "bench": (commands.Bench, {"target": "default", "method": None, "sampling": "greedy", "variants": "none"}),
    "recommend": (commands.Recommend, {"target": "default", "sampling": "t08", "variants": "none"}),
    "speedup": (commands.Speedup, {"target": "default"}),
    "responses": (commands.Responses, {"target": "bundled", "method": "autoregressive", "sampling": "t1"}),
    "activations": (commands.Activations, {"target": "bundled", "corpus": "stdlib"}),
    "acceptance": (commands.Acceptance, {"target": "bundled", "sampling": None}),
    "datastore": (commands.Datastore, {"target": "bundled", "corpus": "stdlib"}),
    "target": (commands.MakeTarget, {}),
    "export": (commands.Export, {"method": None}),
    "report": (commands.Report, {}),
    "check": (commands.Check, {"target": "bundled"}),
    "doctor": (commands.Doctor, {}),
    "train": (
        training.Train,
        {
            "target": "bundled",
            "corpus": "stdlib",
            "data": "online",
            "trainer": "auto",
            "logger": "csv",
            "sampling": None,
            "hardware": None,
        },
    ),
}
PURPOSES = {  # what users want, with the commands for it; `spectrain` lists them so
    "make a model answer faster": ("speedup", "recommend", "chat", "generate", "serve"),
    "train a draft model for it": ("train", "export"),
    "measure": ("bench", "check", "report", "doctor"),
    "prepare targets and data": ("target", "responses", "activations", "acceptance", "datastore"),
}
GROUPS = {  # files of groups that are classes
    ("target", "default"): commands.Answering,
    ("target", "bundled"): Target,
    ("sampling", "greedy"): Sampling,
    ("corpus", "stdlib"): Corpus,
    ("data", "online"): training.Online,
    ("data", "offline"): training.Offline,
    ("data", "served"): training.Served,
    **{("exp", name): kind for name, kind in training.EXPERIMENTS.items()},
}


@cache
def register() -> None:
    """Tell Hydra about every command and group that is not a yaml."""
    store = ConfigStore.instance()
    store.__deepcopy__ = lambda _: store  # Hydra copies all of it for each composition, and what it loads again
    for (name, file), kind in GROUPS.items():
        # An experiment's options stand beside those that all trainings share.
        package = "_global_" if name == "exp" else None
        store.store(group=name, name=file, package=package, node=asdict(kind()))
    for name, (kind, groups) in COMMANDS.items():
        own = {key: value for key, value in plain(kind()).items() if key not in groups}
        store.store(name=name, node={"defaults": ["command", *({k: v} for k, v in groups.items()), "_self_"], **own})


def options_of(command: str, cfg: DictConfig) -> object:
    """Return the options of a command as an object of its class. Raises UserError where a value is wrong."""
    kind, _ = COMMANDS[command]
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return training_of(values) if kind is training.Train else typed(values, kind)


def training_of(values: Mapping, checks: bool = True) -> training.Train:
    """Turn plain values into the options of a training; those of an earlier one need no `checks`."""
    shared, experiment = types_of(training.Train), training.EXPERIMENTS.get(values["kind"])
    del shared["own"]  # which nobody types
    own = {name: value for name, value in values.items() if name not in shared}
    if values["experiment"] and experiment:
        own = typed(own, experiment, checks=checks)
    more = {name: value for name, value in values["trainer"].items() if name not in types_of(training.Trainer)}
    trainer = {name: value for name, value in values["trainer"].items() if name not in more} | {"more": more}
    data = typed(values["data"], GROUPS.get(("data", values["data"]["source"]), training.Online), "data.", checks)
    known = {name: value for name, value in values.items() if name in shared and name != "data"}
    return replace(typed(known | {"trainer": trainer}, training.Train, checks=checks), data=data, own=own)


def module_of(command: str) -> str:
    """Return the module that runs a command, as Python names it."""
    return f"spectrain.{command}" if (PACKAGE / f"{command}.py").is_file() else f"data_prep.{command}"


@cache
def types_of_command(command: str) -> dict[str, Any]:
    """Return the types of a command's options by dotted name, for a training those of all experiments."""
    kind, groups = COMMANDS[command]
    found = types_by_name(kind) | (types_by_name(Artifacts, "method.") if "method" in groups else {})
    if kind is training.Train:
        for experiment in (*training.EXPERIMENTS.values(), kind):
            found |= types_by_name(experiment)
        found |= types_by_name(training.Served, "data.") | types_by_name(training.Offline, "data.")
    return found


def paths_of(command: str) -> set[str]:
    """Return the dotted names of a command's options that are paths."""
    return {name for name, of in types_of_command(command).items() if PATH in parts_of(of)}


def conf_dir() -> Path:
    """The folder of Hydra's presets: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


def read_yaml(file: Path) -> object:
    """Read a YAML file as plain values. Raises ValueError where it is none."""
    try:
        return OmegaConf.to_container(OmegaConf.load(file))
    except YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
