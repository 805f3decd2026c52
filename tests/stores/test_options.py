"""conf/schema/options.yaml: every option has a kind, and values of another kind are one sentence."""

from __future__ import annotations

from functools import cache

import pytest
import yaml
from omegaconf import OmegaConf

from spectrain.errors import UserError
from spectrain.stores.locations import conf_dir
from spectrain.stores.options import check_method_options, check_options, schema
from tests.test_cli import composed

CONF = conf_dir()
COMMANDS = sorted(file.stem for file in CONF.glob("*.yaml") if file.stem != "command")
GROUPS = {  # what a command can be composed with
    "train": ("exp", "data", "trainer", "logger", "sampling"),
    "generate": ("method", "sampling"),
    "bench": ("variants", "sampling"),
    "cost": ("cost", "hardware"),
}
NEEDED = {"train": ["kind=spire", "max_steps=1"], "generate": ["prompt=x"]}


@cache
def configs(command: str) -> list[dict]:
    """The command's config by default, and with each file of its groups."""
    choices = [(*NEEDED.get(command, []),)]
    for group in GROUPS.get(command, ()):
        plus = "+" if group in ("exp", "cost") else ""
        for file in sorted((CONF / group).glob("*.yaml")):
            needed = [] if group == "exp" else NEEDED.get(command, [])
            choices.append((*needed, f"{plus}{group}={file.stem}"))
    return [OmegaConf.to_container(composed(command, *choice)) for choice in choices]


def leaves(node: dict, prefix: str = "") -> list[str]:
    names = []
    for key, value in node.items():
        name = f"{prefix}{key}"
        names += leaves(value, f"{name}.") if isinstance(value, dict) and value else [name]
    return names


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_kind_that_its_defaults_fit(command):
    rows = schema(command)
    for config in configs(command):
        check_options(config, command)
        for name in leaves(config):
            groups = [".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 2)]
            known = any(group in rows for group in groups) or name.startswith(
                ("variants.", "method.")
            )  # a new method may check its options itself
            assert known, f"{name} of {command} has no line in conf/schema/options.yaml"


def test_no_kind_is_left_of_an_option_that_is_gone():
    used = {command: {name for config in configs(command) for name in all_names(config)} for command in COMMANDS}
    tables = yaml.safe_load((CONF / "schema" / "options.yaml").read_text())
    everywhere = set().union(*used.values())
    for command, rows in tables.items():
        own = everywhere if command == "every" else used[command]
        assert set(rows) <= own, command


def all_names(node: dict, prefix: str = "") -> list[str]:
    names = []
    for key, value in node.items():
        names += [f"{prefix}{key}", *(all_names(value, f"{prefix}{key}.") if isinstance(value, dict) else [])]
    return names


REFUSED = {
    "train": {
        "fresh=no": "fresh=no must be true or false",
        "feedback=5": "feedback=5 must be true or false",
        "k=four": "k=four must be a whole number of at least 1",
        "max_steps=0": "max_steps=0 must be a whole number of at least 1, or null",
        "init=5": "init=5 must be pruned, or random, or a path",
        "loss=soft": "loss=soft must be one of mixed, distill, hard",
        "omega=1.5": "omega=1.5 must be a number in [0, 1]",
        "n_layer=0": "n_layer=0 must be a whole number of at least 1, or null",
        "seed=nan": "seed=nan must be a whole number",
        "seed=1e26": "seed=1e+26 must be a whole number",
        "checkpoint_s=-1": "checkpoint_s=-1 must be a number in [0, inf]",
        "optimizer.name=sgd": "optimizer.name=sgd must be one of adamw, muon",
        "optimizer.lr=-1": "optimizer.lr=-1 must be a number in (0, inf)",
        "optimizer.betas=[]": "optimizer.betas=[] must be",
        "optimizer.betas=[2,2]": "optimizer.betas=2 must be a number in [0, 1)",
        "optimizer.betas=[nan,0.5]": "optimizer.betas=nan must be",
        "data.batch_size=0": "data.batch_size=0 must be a whole number of at least 1",
        "select.every=-1": "select.every=-1 must be a whole number of at least 0",
        "select.contexts=0": "select.contexts=0 must be",
        "tau.context_tokens=[]": "tau.context_tokens=[] must be a list, with each value a whole number of at least 1",
        "tau.context_tokens=256": "tau.context_tokens=256 must be a list",
        "tau.temperatures=[-1]": "tau.temperatures=-1 must be a number in [0, inf)",
        "tau=5": "tau=5 must stay a group of options; give one of them: tau.<option>=",
        "target.path=5": "target.path=5 must be a path",
        "out=''": "out= must be a path, or null",
        "out=[a]": "out=['a'] must be a path, or null",
        f"out={'a' * 5000}": "aaa... must be a path, or null",
    },
    "bench": {
        "methods=null": "methods=null must be a name or a list of names",
        "methods={}": "methods={} must be",
        "max_nodes=many": "max_nodes=many must be a whole number of at least 1, or auto, or paper, or null",
        "verification=word": "verification=word must be one of token, block",
        "++sampling.temperature=inf": "sampling.temperature=inf must be a number in [0, inf)",
        "+variants.x={method:pld,max_nodes:1}": "variants.x.max_nodes=1 must be a whole number of at least 2",
        "+variants.x={max_nodes:9}": "variants.x must name its method",
    },
    "generate": {
        "baseline=perhaps": "baseline=perhaps must be true or false",
        "stop_strings=['']": "stop_strings= must be a text that is not empty",
        "stop_strings=[5]": "stop_strings=5 must be a text that is not empty",
        "max_new_tokens=nan": "max_new_tokens=nan must be a whole number of at least 1",
    },
    "responses": {
        "batch_size=1.5": "batch_size=1.5 must be a whole number of at least 1",
        "limit=0": "limit=0 must be a whole number of at least 1, or null",
        "chat=maybe": "chat=maybe must be true or false, or auto",
        "allow_failed=1": "allow_failed=1 must be true or false",
        "timeout_s=0": "timeout_s=0 must be a number in (0, inf)",
        "source=cloud": "source=cloud must be one of loop, server",
        "++sampling.top_k=few": "sampling.top_k=few must be a whole number of at least 0",
    },
    "acceptance": {
        "draws=0": "draws=0 must be a whole number of at least 1",
        "rollout_tokens=1": "rollout_tokens=1 must be a whole number of at least 2",
        "batch_tokens=none": "batch_tokens=none must be a whole number of at least 1",
        "part_rows=0.5": "part_rows=0.5 must be a whole number of at least 1",
        "drafter=[other,words]": "drafter=['other', 'words'] must be a path, or null",
        "responses=1": "responses=1 must be a path, or null",
    },
    "activations": {
        "row_tokens=0": "row_tokens=0 must be a whole number of at least 2",
        "shard_tokens=0.5": "shard_tokens=0.5 must be a whole number of at least 1",
        "dtype=int4": "dtype=int4 must be one of bfloat16, int8",
        "held_out_share=1": "held_out_share=1 must be a number in (0, 1)",
    },
    "datastore": {
        "keep=half": "keep=half must be a whole number of at least 1, or a number in (0, 1], or null",
        "keep=1.5": "keep=1.5 must be a whole number of at least 1, or a number in (0, 1], or null",
        "keep=0": "keep=0 must be",
        "keep_tokens=0": "keep_tokens=0 must be a whole number of at least 1, or null",
        "max_perplexity=0.5": "max_perplexity=0.5 must be a number in [1, inf), or null",
        "perplexity_filter=maybe": "perplexity_filter=maybe must be true or false",
        "corpus.held_out_share=1": "corpus.held_out_share=1 must be a number in [0, 1)",
    },
    "cost": {
        "count_unembedding=maybe": "count_unembedding=maybe must be true or false",
        "investment.decoding=-1": "investment.decoding=-1 must be a number in [0, inf), or null",
        "investment.spire=many": "investment.spire=many must be a number in [0, inf), or null",
        "investment=3": "investment=3 must stay a group of options; give one of them: investment.<option>=",
        "roofline.batch=0": "roofline.batch=0 must be a whole number of at least 1",
        "spot=null": "spot=null must stay a group of options",
        "k=0": "k=0 must be a whole number of at least 1",
        "spot.context_tokens=0": "spot.context_tokens=0 must be a whole number of at least 1",
        "window_tokens=wide": "window_tokens=wide must be a whole number of at least 1, or auto, or share",
        "hardware.bytes_per_s=-1": "hardware.bytes_per_s=-1 must be a number in (0, inf), or null",
        "kv_bytes=-2": "kv_bytes=-2 must be a number in (0, inf), or null",
        "batch=[]": "batch=[] must be a whole number of at least 1, or a list, with each value a whole",
        "batch=[0]": "batch=0 must be a whole number of at least 1",
        "investment.decoding=inf": "investment.decoding=inf must be a number in [0, inf), or null",
    },
}


@pytest.mark.parametrize(("command", "typed"), [(command, typed) for command in REFUSED for typed in REFUSED[command]])
def test_a_value_of_another_kind_is_one_sentence(command, typed):
    base = {"train": ["+exp=spire"], "generate": ["method=pld", "prompt=x"]}.get(command, [])
    config = OmegaConf.to_container(composed(command, *base, typed))
    with pytest.raises(UserError) as refusal:
        check_options(config, command)
    assert REFUSED[command][typed] in str(refusal.value)


def test_options_of_a_method_are_checked_wherever_they_come_from():
    check_method_options({"gamma": 4, "of_a_new_method": object()})
    with pytest.raises(UserError, match="window_columns=0 must be a whole number of at least 1"):
        check_method_options({"window_columns": 0})


@pytest.mark.parametrize("value", ["${tau.new_tokens}", "???"])
def test_interpolations_and_missing_values_are_passed_over(value):
    check_options({"max_new_tokens": value}, "bench")
