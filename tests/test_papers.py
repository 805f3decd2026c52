"""`paper=`: what each preset sets, against the papers' values in papers.txt, and what wins over it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from spectrain.cli import composed
from spectrain.config import options_of
from spectrain.errors import UserError
from spectrain.methods.registry import method_configs

TABLE = (Path(__file__).parent / "papers.txt").read_text()  # paper | command | values | where they stand, by hand
TYPED = """
train paper=spire k=8 +exp=spire optimizer.lr=0.1 | k=8 optimizer.lr=0.1 input=tied
train +exp=spire +ablation=omega_025 paper=spire | omega=0.25 loss=mixed n_layer=quarter
train +exp=spire +ablation=shared_memories paper=spire | feedback=shared memories=final
train +exp=spire engine=vllm paper=spire | own_key=false sink_tokens=0 n_layer=quarter
generate sampling.top_k=7 paper=specdecpp verification=block | sampling.top_k=7 verification=block max_new_tokens=512
generate paper=spectra method=spectra_core method.forward=false | method.forward=false method.threshold=0.9
generate paper=spectra method=pld sampling=t08 | method.match=latest sampling.temperature=0.8 max_new_tokens=1024
responses paper=specdecpp method=specdecpp | method.threshold=0.7 method.max_nodes=paper
bench paper=sssd method=sssd max_nodes=30 | method.max_prefix=4 max_nodes=30
"""
REFUSED = """
generate paper=unknown | paper=unknown is unknown; choose among dflash, eagle3, logitspec, specdecpp, spectra,
train +exp=spire paper=sssd | paper=sssd says nothing of train +exp=spire, only of datastore, responses, generate, bench
train +exp=specdecpp paper=spire | paper=spire says nothing of train +exp=specdecpp, only of train +exp=spire, train
generate paper=spire method=pld,spire | method=pld,spire with paper=spire would need options of several methods;
"""


def rows(table: str) -> list[list[str]]:
    return [line.split(" | ") for line in table.strip().splitlines()]


def check(command: str, wanted: str) -> None:
    name, *typed = command.split(" ")
    cfg = composed(name, *(["prompt=x"] if name == "generate" else []), *typed)
    options_of(name, cfg)
    asked = {key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in wanted.split(" "))}
    assert {key: OmegaConf.select(cfg, key, throw_on_missing=True) for key in asked} == asked


@pytest.mark.parametrize(("paper", "command", "wanted", "source"), rows(TABLE))
def test_a_preset_equals_the_paper_s_values(paper, command, wanted, source):
    check(f"{command} paper={paper}", wanted)


@pytest.mark.parametrize(("command", "wanted"), rows(TYPED))
def test_what_the_user_says_wins(command, wanted):
    check(command, wanted)


def test_variants_of_a_paper_s_method_begin_with_its_options():
    typed = "paper=spectra", "variants=ablations", "methods=[no_forward]", "max_nodes=30"
    asked = options_of("bench", composed("bench", *typed))
    options = method_configs(asked.methods, asked.variants, asked.max_nodes)["no_forward"]
    assert (options.forward, options.threshold, options.max_nodes) == (False, 0.9, 30)


@pytest.mark.parametrize(("command", "sentence"), rows(REFUSED))
def test_a_paper_that_cannot_hold_is_refused(command, sentence):
    with pytest.raises(UserError) as error:
        check(command, "")
    assert str(error.value).startswith(sentence)
