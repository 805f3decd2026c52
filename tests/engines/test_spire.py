"""SPIRe drafters in a running vLLM: lossless, and they draft what they draft in our own loop."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from spectrain.decoding import generate
from spectrain.exports.vllm_folder import write_vllm_folder
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.spire import Spire
from spectrain.models.pruned_init import last_layers, new_drafter
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.models.spire import save as save_spire
from spectrain.target import TargetModel, fingerprint
from spectrain.target.lean import shape_of
from spectrain.target.target import FINAL
from tests.conftest import random_prompts, tiny_model
from tests.engines.engine import Engine, EngineError
from tests.methods.drafts import leaves
from tests.models.test_artifacts import tiny_tokenizer

pytestmark = pytest.mark.slow
GAMMA, NEW, WINDOW = 4, 20, 16
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 10000.0}
TARGETS = {
    "llama": {"num_hidden_layers": 3},
    "biased": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "qwen3": {"head_dim": 32, "num_hidden_layers": 2},
}
ENGINE = {"own_key": False, "sink_tokens": 0}  # with which vLLM's own attention is exact
PREVIOUS, SMALL = {"previous_state": True}, {"draft_vocab": 40}
TRAINED = {"input": "trained", "unembedding": "trained"}
# target, number of blocks, attention, options
CASES = {
    "one block": ("llama", 1, "exact", {"input": "projected", "unembedding": "target"}),
    "three blocks": ("llama", 3, "exact", {**TRAINED, **PREVIOUS, **SMALL, "unembedding": "target", "sink_tokens": 3}),
    "stock": ("llama", 3, "stock", {**TRAINED, **PREVIOUS, **SMALL, **ENGINE, "feedback": "shared"}),
    "tied, biases, stock": ("biased", 2, "stock", {"input": "tied", **ENGINE}),
    "norms of q and k": ("qwen3", 2, "exact", {**TRAINED, **ENGINE, **PREVIOUS, "input": "projected"}),
    "norms of q and k, stock": ("qwen3", 2, "stock", {**TRAINED, **ENGINE}),
    "final states": ("llama", 2, "exact", {**TRAINED, "feedback": False, "target_layers": (FINAL, FINAL)}),
}


@cache
def target_of(name: str) -> TargetModel:
    family = "llama" if name == "biased" else name
    # Four times as wide as other tests' models: with their weights, rounding alone would change drafts.
    sizes = {"hidden_size": 128, "initializer_range": 0.15, "num_key_value_heads": 2}
    model = tiny_model(family, **sizes, **TARGETS[name])
    for weight in model.parameters():
        if weight.dim() == 1:  # norms of 1 and biases of 0 would hide which is which
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return TargetModel(model, tiny_tokenizer())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns the folder of a target."""

    @cache
    def saved(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        target_of(name).model.save_pretrained(folder)
        target_of(name).tokenizer.save_pretrained(folder)
        return folder

    return saved


def drafter_for(target: TargetModel, n_layer: int, options: dict) -> SpireDrafter:
    """A drafter from the target's own blocks, whose memories are mixed at random."""
    layers = last_layers(target.model, n_layer)
    config = {"target_layers": layers, "k": GAMMA, "window_tokens": WINDOW, **options}
    torch.manual_seed(0)
    drafter = new_drafter(target, SpireConfig(shape_of(target.model), **config), "pruned")
    for name, weight in drafter.named_parameters():
        if name == "input.weight":
            torch.nn.init.eye_(weight)
        elif name in ("feedback_weight", "previous.weight"):
            torch.nn.init.normal_(weight, std=1 if "feedback" in name else 0.05)
    return drafter.requires_grad_(False)


def export(folder: Path, drafter: SpireDrafter, target: TargetModel, attention: str) -> Path:
    save_spire(folder, drafter)
    write_vllm_folder(folder, drafter.config, target, "tiny", fingerprint(target.model, None), attention)
    return folder / "vllm"


def speculative(folder: Path, n_tokens: int = GAMMA) -> dict:
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": n_tokens}


class Recording(Spire):
    """Keeps its drafts."""

    def draft(self, context, gamma):
        tree = super().draft(context, gamma)
        self.drafts.append(list(leaves(tree)[0]) if tree.shape[1] > 1 else [])
        return tree


def own_drafts(target: TargetModel, drafter: SpireDrafter, prompt: list[int]) -> tuple[list[int], list[list[int]]]:
    """Return the tokens that our loop generates with a drafter, and its drafts."""
    method = Recording(drafter, GAMMA, draft_dtype="float32")
    method.drafts = []
    (found,) = generate(target, method, [prompt], NEW)
    return found.tokens, method.drafts


@pytest.mark.parametrize("case", CASES)
def test_the_engine_drafts_what_our_loop_drafts(engine, folders, case, tmp_path):
    name, n_layer, attention, options = CASES[case]
    target = target_of(name)
    drafter = drafter_for(target, n_layer, options)
    engine.load(folders(name), speculative(export(tmp_path, drafter, target, attention)))
    engine.ask("record")
    n_drafts = 0
    for prompt in random_prompts([3, 3 * WINDOW, 30]):
        text, drafts = own_drafts(target, drafter, prompt)
        served = engine.generate([prompt], NEW)
        theirs = engine.ask("drafted")
        assert served.tokens == [text]
        assert [one[: len(own)] for one, own in zip(theirs, drafts, strict=False)] == drafts
        n_drafts += len(drafts)
    assert n_drafts > 5  # some texts are short


@pytest.mark.parametrize("attention", ["exact", "stock"])
def test_batches_pieces_of_prompts_and_cancelled_requests(engine, folders, attention, tmp_path):
    target = target_of("llama")
    drafter = drafter_for(target, 3, {**TRAINED, "unembedding": "target", **(ENGINE if attention == "stock" else {})})
    folder, prompts = export(tmp_path, drafter, target, attention), random_prompts([9, 40, 150, 190])
    prompts[3][:140] = prompts[2][:140]  # a block of 128 tokens is found again
    plain = [found.tokens for found in generate(target, Autoregressive(), prompts, NEW)]
    counts = []
    for options in ({}, {"max_num_batched_tokens": 48}):
        engine.load(folders("llama"), speculative(folder), **options)
        for together in (False, True):  # the second time all prompts are found
            served = engine.generate(prompts, NEW, together)
            assert served.tokens == plain
            counts.append((served.drafts, served.accepted_per_position))
    assert counts == counts[:1] * 4
    assert sum(counts[0][1]) > 5
    cut = engine.generate(prompts, NEW, abort={1: 5})
    assert [cut.tokens[i] for i in (0, 2, 3)] == [plain[i] for i in (0, 2, 3)]
    assert plain[1][: len(cut.tokens[1])] == cut.tokens[1]


def refused(engine: Engine, folder: Path, drafter: Path, **options) -> str:
    """The sentence in the engine's log, and in its error."""
    with pytest.raises(EngineError) as error:
        engine.load(folder, speculative(drafter), **options)
    (line,) = [line for line in engine.said().splitlines() if "SPIRe drafter refused: " in line][-1:]
    sentence = line.partition("refused: ")[2]
    assert sentence in str(error.value)
    return sentence


def test_what_does_not_fit_is_refused_in_a_sentence_before_the_engine_serves(engine, folders, tmp_path):
    target = target_of("llama")
    drafter = export(tmp_path, drafter_for(target, 1, {"input": "tied"}), target, "exact")
    other = TargetModel(tiny_model("llama", 1, hidden_size=128, num_key_value_heads=2, num_hidden_layers=3))
    other.model.save_pretrained(tmp_path / "other")
    target.tokenizer.save_pretrained(tmp_path / "other")
    assert "the embedding of the model that is served is another one" in refused(engine, tmp_path / "other", drafter)
    assert "(n_blocks 3), not for" in refused(engine, folders("qwen3"), drafter)
    config = (drafter / "config.json").read_text()
    (drafter / "config.json").write_text(config.replace('"version": 1', '"version": 2'))
    assert "has format 2, but this spectrain reads 1; write it anew" in refused(engine, folders("llama"), drafter)
    (drafter / "config.json").write_text(config)
    (drafter / "target.safetensors").rename(tmp_path / "kept")
    lacks = "files lack model.target_norm.weight, model.target_rows; copy the drafter's folder again"
    assert lacks in refused(engine, folders("llama"), drafter)
    (drafter / "target.safetensors").write_bytes((tmp_path / "kept").read_bytes()[:-9])
    assert "a file of the drafter is damaged (" in refused(engine, folders("llama"), drafter)
    (tmp_path / "kept").rename(drafter / "target.safetensors")
    engine.load(folders("llama"), speculative(drafter, GAMMA + 1))
    assert f"num_speculative_tokens={GAMMA + 1} is more than the {GAMMA} tokens" in engine.said()
