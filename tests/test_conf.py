"""Every yaml of conf/ composes; every method and trainer instantiates where its hardware exists."""

from __future__ import annotations

import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf

from spectrain.decoding import Drafter, Sampling, TargetModel, tokenizer_fingerprint
from spectrain.methods.registry import build_method, method_configs
from spectrain.stores.locations import conf_dir
from spectrain.training.base import Experiment
from spectrain.training.fit import build_trainer
from spectrain.training.optim import OptimizerSettings
from tests.conftest import tiny_model
from tests.retrieval.reference import make_store
from tests.test_cli import composed

CONF = conf_dir()
GROUPS = {  # group -> the command that takes it, and how
    "exp": ("train", "+exp={}"),
    "ablation": ("train", "+ablation={}"),
    "target": ("train", "target={}"),
    "corpus": ("train", "corpus={}"),
    "data": ("train", "data={}"),
    "trainer": ("train", "trainer={}"),
    "logger": ("train", "logger={}"),
    "method": ("generate", "method={}"),
    "sampling": ("generate", "sampling={}"),
    "variants": ("bench", "variants={}"),
    "cost": ("cost", "+cost={}"),
    "hardware": ("cost", "hardware={}"),
}
NEEDED = {"train": ["kind=x", "max_steps=1"], "generate": ["prompt=x"], "bench": [], "cost": []}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def test_every_group_is_tested():
    folders = {path.name for path in CONF.iterdir() if path.is_dir()} - {"hydra", "schema"}
    assert folders == set(GROUPS) | {"sweep"}  # what W&B reads, no group of Hydra


@pytest.mark.parametrize(("group", "option"), [(group, option) for group in GROUPS for option in options(group)])
def test_every_yaml_composes(group, option):
    command, override = GROUPS[group]
    needed = {"exp": [], "ablation": ["+exp=spire"]}.get(group, NEEDED[command])
    cfg = composed(command, *needed, override.format(option))
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


@pytest.mark.parametrize("group", ["target=bundled", "method=sssd", "sampling=t08", "source=server"])
def test_responses_compose(group):
    OmegaConf.to_container(composed("responses", group), resolve=True, throw_on_missing=True)


@pytest.mark.parametrize("group", ["target=bundled", "corpus=stdlib"])
def test_activations_compose(group):
    OmegaConf.to_container(composed("activations", group), resolve=True, throw_on_missing=True)


def test_parity_composes():
    OmegaConf.to_container(composed("parity", "run=x"), resolve=True, throw_on_missing=True)


@pytest.mark.parametrize("group", ["target=bundled", "method=sssd"])
def test_exports_compose(group):
    OmegaConf.to_container(composed("export", group), resolve=True, throw_on_missing=True)


@pytest.mark.parametrize("option", options("sampling"))
def test_acceptance_labels_compose_with_every_sampling_and_without(option):
    assert composed("acceptance").get("sampling") is None
    Sampling.from_options(composed("acceptance", f"sampling={option}").sampling)


@pytest.mark.parametrize("path", sorted(CONF.glob("**/*.yaml")), ids=lambda p: str(p.relative_to(CONF)))
def test_every_yaml_says_what_it_is(path):
    assert path.read_text().startswith("#") or path.parent.parent.name == "hydra", path


@pytest.mark.parametrize("option", options("exp"))
def test_every_experiment_names_a_training(option):
    cfg = composed("train", f"+exp={option}")
    assert issubclass(get_class(cfg.experiment._target_), Experiment)
    OptimizerSettings(**cfg.optimizer)


@pytest.mark.parametrize("option", options("trainer"))
def test_every_trainer_instantiates_where_its_hardware_exists(option):
    hardware = [] if torch.cuda.is_available() else ["trainer.accelerator=cpu", "trainer.devices=1"]
    cfg = composed("train", "+exp=spire", f"trainer={option}", *hardware)
    assert build_trainer(OmegaConf.to_container(cfg, resolve=True), 1, [], []).world_size >= 1


@pytest.mark.parametrize("option", options("sampling"))
def test_every_sampling_instantiates(option):
    Sampling(**composed("generate", "prompt=x", f"sampling={option}").sampling)


@pytest.mark.parametrize("option", options("method"))
def test_every_method_instantiates(option, exported):
    cfg = composed("generate", "prompt=x", f"method={option}")
    target, folders = exported
    assert isinstance(build_method(cfg.method, target, folders), Drafter)


@pytest.mark.parametrize("option", options("variants"))
def test_every_variant_instantiates(option, exported):
    cfg = composed("bench", f"variants={option}")
    target, folders = exported
    for name, options_of in method_configs(cfg).items():
        if name in cfg.variants:
            assert isinstance(build_method(options_of, target, folders), Drafter)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[TargetModel, dict[str, str]]:
    """A tiny target, and an artifact of every kind for it."""
    from tests.models.test_artifacts import export_spire, export_vanilla, tiny_tokenizer
    from tests.models.test_head import export_head

    target = TargetModel(tiny_model("llama"), tiny_tokenizer())
    root = tmp_path_factory.mktemp("checkpoints")
    make_store(root / "store", [[1, 2, 3]], target.vocab_size, tokenizer=tokenizer_fingerprint(target.tokenizer))
    vanilla = export_vanilla(root / "vanilla", target)
    return target, {
        "spire": str(export_spire(root / "spire", target)),
        "vanilla": str(vanilla),
        "head": str(export_head(root / "head", target, vanilla)),
        "datastore": str(root / "store"),
    }
