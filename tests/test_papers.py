"""`paper=`: what each preset sets, against the papers' values written by hand, and what wins over it."""

from __future__ import annotations

import pytest
import yaml
from omegaconf import OmegaConf

from spectrain.cli import composed
from spectrain.config import options_of
from spectrain.errors import UserError
from spectrain.methods.registry import method_configs

TABLE = """
spire | train +exp=spire | n_layer=quarter k=4 window_tokens=64 sink_tokens=1 init=pruned input=tied unembedding=trained
spire | train +exp=spire | previous_state=false draft_vocab=null feedback=true memories=blocks target_activations=true
spire | train | kind=spire loss=mixed omega=0.5 data.row_tokens=1024 data.loss_on=all trainer.gradient_clip_val=1
spire | train | optimizer.name=adamw optimizer.betas=[0.9,0.95] optimizer.weight_decay=0.1
spire | train | tau.context_tokens=[256,512,960] tau.new_tokens=64 tau.temperatures=[1]
spire | train +exp=vanilla | n_layer=null hidden_size=null optimizer.name=adamw data.row_tokens=1024 data.loss_on=all
spire | activations | layers=quarter row_tokens=1024
spire | generate | verification=token sampling.temperature=1 sampling.top_k=0 method.gamma=4 method.draft_vocab=null
spire | bench | verification=token sampling.temperature=1 max_nodes=paper variants.spire.gamma=4
spire | bench | variants.magicdec.gamma=4 variants.magicdec.sink_tokens=1 variants.magicdec.window_tokens=64
spire | bench | variants.magicdec.positions=cache
specdecpp | responses | verification=token sampling.temperature=1 sampling.top_k=50 max_new_tokens=512
specdecpp | acceptance | sampling.temperature=1 sampling.top_k=50 draws=1
specdecpp | train | kind=specdecpp sampling.temperature=1 sampling.top_k=50 epochs=3 n_blocks=3 w_rej=6 w_acc=1
specdecpp | train | mixing_share=0.15 held_out_share=0.2 data.batch_size=32 optimizer.lr=0.00005
specdecpp | train +exp=specdecpp | optimizer.weight_decay=0 optimizer.schedule=cosine optimizer.warmup_share=0.03
specdecpp | generate | verification=token sampling.temperature=1 sampling.top_k=50 method.threshold=0.7
specdecpp | generate | method.judge=current method.max_candidates=20 method.max_nodes=paper
specdecpp | bench | verification=token sampling.temperature=1 sampling.top_k=50 variants.specdecpp.threshold=0.7
specdecpp | bench | variants.speculative_2.gamma=2 variants.speculative_14.gamma=14 max_nodes=paper
logitspec | generate | verification=token sampling.temperature=0 max_new_tokens=1024 method.max_ngram=3
logitspec | generate | method.continuation_tokens=20 method.input_tokens=20 method.max_nodes=paper
logitspec | bench | sampling.temperature=0 max_new_tokens=1024 max_nodes=paper batch_size=1
spectra | datastore | keep=100000 perplexity_filter=true
spectra | generate | verification=token sampling.temperature=0 max_new_tokens=1024 seed=0 method.ngram_tokens=5
spectra | generate | method.pool_sequences=15 method.max_guesses=15 method.threshold=0.9 method.pool_from_output=false
spectra | bench | sampling.temperature=0 max_new_tokens=1024 variants.spectra_core.threshold=0.9 max_nodes=paper
sssd | datastore | keep=null
sssd | responses | verification=token sampling.temperature=0 max_new_tokens=500
sssd | generate | sampling.temperature=0 max_new_tokens=500 method.max_prefix=4 method.max_matches=100
sssd | bench | variants.sssd.max_prefix=4 variants.sssd_input.datastore_source=false max_nodes=paper
"""
TYPED = """
train paper=spire k=8 +exp=spire optimizer.lr=0.1 | k=8 optimizer.lr=0.1 input=tied
train +exp=spire +ablation=omega_025 paper=spire | omega=0.25 loss=mixed n_layer=quarter
train +exp=spire +ablation=shared_memories paper=spire | feedback=shared memories=final
generate sampling.top_k=7 paper=specdecpp verification=block | sampling.top_k=7 verification=block max_new_tokens=512
generate paper=spectra method=spectra_core method.forward=false | method.forward=false method.threshold=0.9
generate paper=spectra method=pld sampling=t08 | method.match=latest sampling.temperature=0.8 max_new_tokens=1024
responses paper=specdecpp method=specdecpp | method.threshold=0.7 method.max_nodes=paper
bench paper=sssd method=sssd max_nodes=30 | method.max_prefix=4 max_nodes=30
"""
REFUSED = """
generate paper=unknown | paper=unknown is unknown; choose among logitspec, specdecpp, spectra, spire, sssd
train +exp=spire paper=sssd | paper=sssd says nothing of train +exp=spire, only of datastore, responses, generate, bench
train +exp=target paper=spire | paper=spire says nothing of train +exp=target, only of train +exp=spire, train
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


@pytest.mark.parametrize(("paper", "command", "wanted"), rows(TABLE))
def test_a_preset_equals_the_paper_s_values(paper, command, wanted):
    check(f"{command} paper={paper}", wanted)


@pytest.mark.parametrize(("command", "wanted"), rows(TYPED))
def test_what_the_user_says_wins(command, wanted):
    check(command, wanted)


def test_variants_of_a_paper_s_method_begin_with_its_options():
    typed = "paper=spectra", "variants=ablations", "methods=[no_forward]", "max_nodes=30"
    options = method_configs(options_of("bench", composed("bench", *typed)))["no_forward"]
    assert (options.forward, options.threshold, options.max_nodes) == (False, 0.9, 30)


@pytest.mark.parametrize(("command", "sentence"), rows(REFUSED))
def test_a_paper_that_cannot_hold_is_refused(command, sentence):
    with pytest.raises(UserError) as error:
        check(command, "")
    assert str(error.value).startswith(sentence)
