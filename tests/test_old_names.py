"""What exports, cards and methods outside of this project call by an earlier name is found."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
from hydra.utils import get_object

from spectrain.old_names import MOVED

# What 718e088 wrote into run.json, config.yaml and results: trainings, sources and methods.
WRITTEN = (
    *(f"spectrain.training.{one}" for one in ("spire.SpireExperiment", "vanilla.VanillaExperiment")),
    *(f"spectrain.training.{one}" for one in ("head.HeadExperiment", "target.TargetExperiment", "loggers.csv")),
    *(f"spectrain.training.sources.{one}" for one in ("Online", "Offline", "Served")),
    *("spectrain.training.strategies.deepspeed", "spectrain.training.strategies.FSDP2Strategy"),
    *("spectrain.methods.spire.build", "spectrain.methods.draft_tree.build", "spectrain.methods.auto.Auto"),
    *("spectrain.methods.autoregressive.Autoregressive", "spectrain.methods.pld.PromptLookup"),
)


@pytest.mark.parametrize("name", MOVED)
def test_a_module_by_its_earlier_name_is_the_same_object(name):
    sys.modules.pop(name, None)
    assert import_module(name) is import_module(MOVED[name])
    package, _, last = name.rpartition(".")
    assert getattr(import_module(package), last) is import_module(MOVED[name])


@pytest.mark.parametrize("name", WRITTEN)
def test_what_runs_and_presets_name_is_where_it_was(name):
    assert get_object(name)
