"""A kind of drafter in four files and one line: `model.py`, `training.py`, `method.py`, `toy.yaml`, and `OPTIONS`.

It is one linear layer over the target's final state, and shows that nothing else of the project needs to know a kind.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hydra.core.config_store import ConfigStore

from spectrain import config
from spectrain.config import training
from spectrain.config.fields import always, option
from spectrain.config.training import Optimizer
from spectrain.config.values import FilePath, Positive, Whole

FILES = {"model": "spectrain.models.toy", "method": "spectrain.methods.toy", "training": "spectrain.training.toy"}


@dataclass
class Toy:
    """One linear layer over the target's final state."""

    kind: str = "toy"
    experiment: dict[str, Any] = always({"_target_": "spectrain.training.toy.ToyExperiment"})
    max_steps: Whole | None = option(None, "optimizer steps; null: as tokens_per_parameter says")
    tokens_per_parameter: Positive = option(1.0, "tokens per trained parameter")
    k: Whole = option(3, "drafted tokens")
    init: FilePath = option("random", "random, or a toy drafter that is trained further")
    draft_vocab: Whole | Literal["auto"] | None = option(None, "tokens that it can draft")
    optimizer: Optimizer = always(Optimizer())


def install(monkeypatch, folder: Path) -> None:
    """Add the kind to this process, with a copy of `conf/` in an empty folder."""
    shutil.copytree(config.conf_dir(), folder / "conf")
    shutil.copy(Path(__file__).with_name("toy.yaml"), folder / "conf" / "method")
    for file in config.PACKAGE.glob("*.py"):
        (folder / file.name).symlink_to(file)
    monkeypatch.setattr(config, "PACKAGE", folder)
    monkeypatch.setitem(training.EXPERIMENTS, "toy", Toy)  # the line in config/training.py
    monkeypatch.setitem(config.GROUPS, ("exp", "toy"), Toy)
    config.register()
    store = ConfigStore.instance()
    store.store(group="exp", name="toy", package="_global_", node=asdict(Toy()))
    stored = store.repo["exp"]
    monkeypatch.setitem(stored, "toy.yaml", stored.pop("toy.yaml"))  # so that it goes with the test
    for name, module in FILES.items():
        spec = importlib.util.spec_from_file_location(module, Path(__file__).with_name(f"{name}.py"))
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module, made)
        package, _, last = module.rpartition(".")
        monkeypatch.setattr(sys.modules[package], last, made, raising=False)
        spec.loader.exec_module(made)
