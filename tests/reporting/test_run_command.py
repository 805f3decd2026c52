"""The command that is put together from a run's config composes that config again."""

from __future__ import annotations

import shlex

import pytest
from omegaconf import OmegaConf

from spectrain.reporting.run_command import command_of
from tests.test_cli import composed

TYPED = [
    ("train", ["+exp=spire"]),
    (
        "train",
        ["+exp=vanilla", "target=/some/model", 'corpus="/a b/c=\\"d.jsonl"', "n_layer=3", "tau.temperatures=[0.0,0.7]"],
    ),
    ("train", ["+exp=spire", "data=offline", "data.path=/x", "feedback=false", "out=null", 'run_dir="1"']),
    ("train", ["+exp=specdecpp", "w_rej=12", "drafter='checkpoints/a,b'", "optimizer.betas=[0.5,0.9]"]),
    ("train", ["+exp=target", "model.hidden_size=32", "trainer=gpu"]),
    ("bench", ["methods=[pld,mine]", "+variants.mine={method: rest, datastore: other}", "sampling.temperature=0.5"]),
    ("tune", ["budget=true", "nodes=[2,4]", "prompts='{a}.jsonl'"]),
    ("tune", ["method=sssd", "method.min_matches=5", "out=here"]),
]


def resolved(name: str, arguments: list[str]) -> dict:
    return OmegaConf.to_container(composed(name, *arguments), resolve=True)


@pytest.mark.parametrize(("name", "typed"), TYPED, ids=str)
def test_the_command_composes_the_same_config(name, typed):
    config = resolved(name, typed)
    python, _, module, *arguments = shlex.split(command_of(config))
    assert (python, module) == ("python", f"spectrain.{name}")
    assert resolved(name, arguments) == config


def test_defaults_are_not_repeated():
    assert command_of(resolved("train", ["+exp=spire", "k=6"])) == "python -m spectrain.train +exp=spire k=6"


def test_what_a_command_adds_to_its_config_is_no_option():
    config = resolved("bench", ["out=b"]) | {"measured": {"questions": "x"}}
    assert command_of(config) == "python -m spectrain.bench out=b"


@pytest.mark.parametrize("config", [{"kind": "unheard"}, {"kind": "tune", "method": {"_target_": "a.gone.build"}}, {}])
def test_what_no_config_knows_has_no_command(config):
    assert command_of(config) is None
