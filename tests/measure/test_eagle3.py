"""A folder that loads and accepts little is told what it was trained with: each known mistake is planted, and named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from spectrain.measure.acceptance import Answer
from spectrain.measure.eagle3 import PAIRINGS, SGLANG, VLLM, check
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, default_layers, save, unrolled
from spectrain.models.root_attention import drafted_places
from spectrain.target import TargetModel
from spectrain.target.lean import shape_of
from tests.conftest import tiny_model

N_TOKENS, MOODS, N_LAYER, K = 40, 5, 8, 4
WRITTEN = slice(2, 10)  # tokens that texts have
STEPS, ROWS, TEXT_TOKENS = 120, 16, 24
LAYERS = "eagle_aux_hidden_state_layer_ids"


class Texts(NamedTuple):
    """Texts as a target would have written them."""

    tokens: torch.Tensor  # [B, T]
    captured: torch.Tensor  # [B, T, L + 1, D]
    p: torch.Tensor  # [B, T, V]


class World:
    """Texts whose next token follows from the last one and a mood that only the target's states tell.

    Moods of a text go round. Each layer has its own code of token and mood.
    """

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.follows = torch.randint(WRITTEN.start, WRITTEN.stop, (N_TOKENS, MOODS), generator=self.generator)
        self.codes = [self.draw(N_LAYER + 1, n, 32) * self.draw(N_LAYER + 1, n, 1).exp() for n in (N_TOKENS, MOODS)]

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def texts(self, n_rows: int, n_tokens: int) -> Texts:
        """Draw texts, of which two tokens of five do not follow."""
        tokens = torch.randint(WRITTEN.start, WRITTEN.stop, (n_rows, n_tokens), generator=self.generator)
        begins = torch.randint(0, MOODS, (n_rows, 1), generator=self.generator)
        moods = (begins + torch.arange(n_tokens)) % MOODS
        follows = torch.rand(n_rows, n_tokens, generator=self.generator) < 0.6
        for t in range(1, n_tokens):
            next_tokens = self.follows[tokens[:, t - 1], moods[:, t - 1]]
            tokens[:, t] = torch.where(follows[:, t], next_tokens, tokens[:, t])
        p = F.one_hot(self.follows[tokens, moods], N_TOKENS) * 0.8 + 0.2 / N_TOKENS
        states = 4 * (self.codes[0][:, tokens] + self.codes[1][:, moods])
        return Texts(tokens, states.permute(1, 2, 0, 3), p)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def target() -> TargetModel:
    options = {"vocab_size": N_TOKENS, "num_hidden_layers": N_LAYER, "rope_parameters": {"rope_theta": 100.0}}
    return TargetModel(tiny_model("llama_gqa", **options))


@pytest.fixture(scope="module")
def drafter(world, target) -> Eagle3Drafter:
    """A drafter that was trained on the default layers, with none of the options."""
    torch.manual_seed(1)
    layers = default_layers(N_LAYER)
    made = Eagle3Drafter(Eagle3Config(shape_of(target.model), layers, k=K, draft_vocab=8), target)
    made.kept.copy_(torch.arange(N_TOKENS)[WRITTEN])
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01, betas=(0.9, 0.98))
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.01 * max(0.02, 1 - step / STEPS)
        texts, loss = world.texts(ROWS, TEXT_TOKENS), 0.0
        states = unrolled(made, texts.tokens, texts.captured[:, :, list(layers)], K, first_root=1)
        for i, state in enumerate(states):
            places, (reached,) = drafted_places(TEXT_TOKENS, i, 1, 1, None)
            log_q = made.lm_head(state[:, reached]).log_softmax(-1)
            loss = loss - (texts.p[:, places[reached]][..., made.kept] * log_q).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.requires_grad_(False)


@pytest.fixture(scope="module")
def answers(world, drafter) -> list[Answer]:
    texts, first = world.texts(6, 8 * K), 2 * K
    rows = zip(*(one.split(1) for one in texts), strict=True)
    return [Answer(tokens, first, captured, p[0, first:]) for tokens, captured, p in rows]


@pytest.fixture(autouse=True)
def _far_answers(monkeypatch):
    """The target has no states like those of the world, so no answers are read behind one another."""
    monkeypatch.setattr("spectrain.measure.eagle3.joined", lambda target, answers: answers)


@pytest.fixture
def folder(tmp_path, drafter) -> Path:
    """What another project would publish of it."""
    save(tmp_path, drafter)
    (tmp_path / "kept.npy").unlink()
    return tmp_path


def edit(folder: Path, tensors: dict | None = None, **keys) -> None:
    """Change config.json and tensors of a folder; what is None is removed."""
    file = folder / "config.json"
    changed = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    state = load_file(folder / "model.safetensors") | (tensors or {})
    save_file({name: one for name, one in state.items() if one is not None}, folder / "model.safetensors")


def with_layers(*layers: int):
    inner = {LAYERS: [layer - 1 for layer in layers]}
    return lambda folder: edit(folder, **{LAYERS: list(layers), "eagle_config": inner})


def with_ids(folder: Path) -> None:
    edit(folder, {"d2t": torch.arange(N_TOKENS)[WRITTEN], "t2d": None})


def unsorted(folder: Path) -> None:
    ids = torch.arange(N_TOKENS)[WRITTEN].roll(3)
    edit(folder, {"d2t": ids - torch.arange(8)})


def with_norms(folder: Path) -> None:
    edit(folder, {f"fc_norm.{i}.weight": torch.ones(32) for i in range(3)}, fc_norm=True)


PLANTED = {
    "layers + 1": (with_layers(3, 5, 6), "the inputs of blocks 2, 4, 5", f"write {LAYERS}: [2, 4, 5]"),
    "layers - 1": (with_layers(1, 3, 4), "the inputs of blocks 2, 4, 5", f"write eagle_config.{LAYERS}: [1, 3, 4]"),
    "another set": (with_layers(2, 4, 6), "the inputs of blocks 2, 4, 5", f"write {LAYERS}: [2, 4, 5]"),
    "norm_before_residual": (
        lambda folder: edit(folder, norm_before_residual=True),
        "norm_before_residual: false",
        "write norm_before_residual: false",
    ),
    "fc_norm": (with_norms, "no norm before fc", "write fc_norm: false, norm_before_fc: false"),
    "norm_output": (lambda folder: edit(folder, norm_output=True), "norm_output: false", "write norm_output: false"),
    "d2t as ids": (with_ids, "d2t as ids", "write d2t as target id - row"),
    "d2t unsorted": (unsorted, "d2t as offsets, and rows ascending by id", "write d2t as target id - row"),
    "RoPE base": (lambda folder: edit(folder, rope_theta=1.5), "RoPE base 100", "write rope_theta: 100.0"),
}


def test_a_right_folder_has_no_better_reading(folder, target, answers):
    measured, said = check(str(folder), target, answers, K)
    assert said["wrong"] == []
    assert said["readings"][0]["reading"] == "as its files say"
    assert measured.tau().value == said["readings"][0]["tau"]["value"] > 2.2
    assert [one["said"].partition(", tau")[0] for one in said["engines"]] == [
        f"{engine} reads it as it was trained" for engine in (VLLM, SGLANG)
    ]


SLOW = {"layers + 1", "another set", "norm_before_residual", "d2t unsorted"}
SOME_SLOW = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PLANTED]


@pytest.mark.parametrize("name", SOME_SLOW)
def test_a_planted_mistake_lowers_tau_and_is_named(folder, target, answers, drafter, name):
    plant, words, to_write = PLANTED[name]
    plant(folder)
    measured, said = check(str(folder), target, answers, K)
    best = said["readings"][0]
    assert best["reading"] == words
    assert best["gain"]["low"] > 0.1
    assert measured.tau().value < best["tau"]["value"] - 0.1
    assert said["wrong"][0].startswith(f"It was trained with {words}: tau {best['tau']['value']:.2f} in place of")
    assert any(to_write in one for one in said["wrong"][1:])


PAIRED = {
    "unshifted": (lambda one: replace(one, tokens=one.tokens.roll(-1, 1)), PAIRINGS["unshifted"]),
    "next": (lambda one: replace(one, captured=one.captured.roll(1, 1)), PAIRINGS["next"]),
    "twice": (lambda one: replace(one, captured=one.captured.roll(-1, 1)), PAIRINGS["twice"]),
}


@pytest.mark.parametrize("name", PAIRED)
def test_a_drafter_that_was_trained_on_tokens_that_stand_elsewhere_is_named(folder, target, answers, name):
    """What the drafter was trained with is what the answers lack, so they are shifted the other way."""
    plant, words = PAIRED[name]
    said = check(str(folder), target, [plant(one) for one in answers], K)[1]
    best = said["readings"][0]
    assert best["reading"] == words
    assert best["gain"]["low"] > 0.1
    assert "; train it again, because no engine reads it so" in said["notes"][0]


def test_a_drafter_of_another_target_is_named(folder, target, answers):
    other = [replace(one, captured=8 * torch.randn_like(one.captured)) for one in answers]
    (said,) = check(str(folder), target, other, K)[1]["wrong"]
    assert said.startswith("It makes nothing of this target's states")


def test_what_engines_read_otherwise_or_not_at_all_is_said(folder, target, answers):
    inner = {LAYERS: [1, 3, 4]}
    edit(folder, **{LAYERS: None, "eagle_config": inner, "norm_before_residual": False})  # as SpecForge writes it
    said = check(str(folder), target, answers, K)[1]
    (wrong,) = said["wrong"]
    assert wrong.startswith(
        f"{VLLM} reads the inputs of blocks 1, 3, 4, but it was trained with the inputs of blocks 2, 4, 5"
    )
    assert f"; write {LAYERS}: [2, 4, 5]: tau 2." in wrong
    edit(folder, draft_vocab_size=None)
    _, sglang = check(str(folder), target, answers, K)[1]["engines"]
    (write,) = sglang["write"]
    assert write.endswith(f"; write draft_vocab_size: {WRITTEN.stop - WRITTEN.start}")
    edit(folder, draft_vocab_size=WRITTEN.stop - WRITTEN.start)
    edit(folder, {"d2t": torch.arange(N_TOKENS)[WRITTEN] + 30}, architectures=["LlamaEagle3DraftModel"])
    vllm, sglang = check(str(folder), target, answers, K)[1]["engines"]
    for one in (vllm, sglang):
        assert "does not load it: of architectures it knows LlamaForCausalLMEagle3, not ['LlamaEagle3" in one["said"]
        assert one["write"] == ["it adds the rows' numbers to d2t, which leads out of the vocabulary; write offsets"]
