"""llama.cpp writes the greedy text of our loop; its steps are counted; what it cannot decode is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from spectrain.decoding import Sampling, TargetModel, generate
from spectrain.errors import UserError
from spectrain.measure import llama_cpp
from spectrain.measure.baselines import build_baseline
from spectrain.measure.llama_cpp import LLAMA_CPP, LlamaCpp, WeightsFile, check_options
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.pld import PromptLookup
from tests.conftest import random_prompts, tiny_model
from tests.decoding.test_lean import MODELS

PROMPT, TEXT = [7, 8, 9], [10, 11, 12, 13, 14, 15, 3]  # the scripted model continues the prompt so; 3 ends a text
DRAFTS = [[11, 99], [], [14, 15, 98]]  # after 10; 10 11 12; 10 11 12 13 is emitted: accepted are 1, 0, 2
DECODED = [name for name in MODELS if name not in ("llama, gelu", "llama, yarn")]


class ScriptedLlama:
    """Stands in for llama_cpp.Llama: writes TEXT, and verifies the drafts of its draft model against it."""

    def __init__(self, path: str, draft_model=None, **options):
        self.path, self.draft_model, self.options = path, draft_model, options
        self.n_resets, self.closed = 0, False

    def reset(self) -> None:
        self.n_resets += 1

    def close(self) -> None:
        self.closed = True

    def generate(self, prompt: list[int], temp: float):
        assert (prompt[:3], temp) == (PROMPT, 0.0)
        yield TEXT[0]
        done = 1
        while done < len(TEXT):
            draft = self.draft_model(prompt + TEXT[:done]) if self.draft_model else []
            accepted = next((i for i, token in enumerate(draft) if token != TEXT[done + i]), len(draft))
            yield from TEXT[done : done + accepted + 1]
            done += accepted + 1


@pytest.fixture
def scripted(monkeypatch) -> list[ScriptedLlama]:
    """Put a scripted package in the place of llama_cpp; returns what is opened of it."""
    opened, package, speculative = [], ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    drafts = iter(DRAFTS)

    def open_model(*arguments, **options) -> ScriptedLlama:
        opened.append(ScriptedLlama(*arguments, **options))
        return opened[-1]

    package.Llama = open_model
    speculative.LlamaPromptLookupDecoding = lambda *sizes: lambda tokens: next(drafts)
    for module in (package, speculative):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return opened


WEIGHTS = SimpleNamespace(path=Path("target.gguf"), ggml_type=30, max_tokens=3000)


def test_plain_decoding_has_one_token_per_forward(scripted):
    (generation,) = LlamaCpp(WEIGHTS, [3])([PROMPT], 20, Sampling(), seed=1, prompt_numbers=[4])
    assert (generation.tokens, generation.finish_reason) == (TEXT, "eos")
    assert (generation.target_forwards, generation.accepted, generation.drafted) == (6, [], [])
    assert generation.prefill_s == generation.elapsed_s > 0
    (cut,) = LlamaCpp(WEIGHTS, [])([PROMPT], 2)
    assert (cut.tokens, cut.finish_reason, cut.target_forwards) == (TEXT[:2], "length", 1)


def test_drafts_and_accepted_tokens_of_its_prompt_lookup_are_counted(scripted):
    decode = LlamaCpp(WEIGHTS, [3], draft_tokens=3, max_ngram=2)
    (generation,) = decode([PROMPT], 20)
    assert (generation.tokens, generation.target_forwards) == (TEXT, 3)
    assert (generation.drafted, generation.accepted) == ([2, 0, 3], [1, 0, 2])


def test_a_text_that_is_cut_counts_the_accepted_tokens_that_it_has(scripted):
    (cut,) = LlamaCpp(WEIGHTS, [3], draft_tokens=3, max_ngram=2)([PROMPT], 2)
    assert (cut.tokens, cut.target_forwards, cut.drafted, cut.accepted) == (TEXT[:2], 1, [2], [0])


def test_the_model_is_opened_with_the_threads_and_dtype_of_the_target_and_again_for_a_longer_text(scripted):
    decode = LlamaCpp(WEIGHTS, [3])
    decode([PROMPT, PROMPT], 2040)
    for _ in range(2):
        decode([PROMPT * 3], 2991)
    first, second = scripted
    assert (first.path, first.n_resets, first.closed, second.closed) == ("target.gguf", 2, True, False)
    assert [one.options["n_ctx"] for one in scripted] == [2048, 3000]
    assert first.options["n_threads"] == first.options["n_threads_batch"] == torch.get_num_threads()
    assert (first.options["type_k"], first.options["type_v"], first.options["logits_all"]) == (30, 30, False)


def test_the_options_of_our_lookup_reach_its_prompt_lookup(scripted, monkeypatch):
    seen = []
    module = sys.modules["llama_cpp.llama_speculative"]
    monkeypatch.setattr(module, "LlamaPromptLookupDecoding", lambda *sizes: seen.append(sizes))
    target = TargetModel(tiny_model())
    for lookup in (PromptLookup(draft_tokens=5, max_ngram=4), PromptLookup(draft_tokens=5, max_nodes=3)):
        build_baseline("llama_cpp_lookup", target, lookup, copies=SimpleNamespace(file=WEIGHTS))
    assert seen == [(4, 5), (3, 2)]


def test_missing_packages_and_sampling_are_refused(monkeypatch):
    with pytest.raises(UserError, match=r"decodes greedily only, not with temperature 0.8; give sampling=greedy"):
        check_options(Sampling(temperature=0.8))
    for name in ("llama_cpp", "gguf"):
        monkeypatch.setattr(llama_cpp, "PACKAGES", (name,))
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
        with pytest.raises(UserError, match=rf"{name}.*run pip install llama-cpp-python gguf"):
            check_options(Sampling())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: tiny_model("gemma"), "target of type gemma"),
        (lambda: tiny_model(hidden_act="gelu"), "its activation function is gelu, not silu"),
        (MODELS["llama, yarn"], "its RoPE is of type yarn"),
        (
            lambda: tiny_model("qwen3", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
            "its RoPE is of type linear",
        ),
        (lambda: tiny_model().to("meta"), "it is on meta, not on the CPU"),
    ],
)
def test_targets_that_it_cannot_decode_are_refused(model, reason):
    with pytest.raises(UserError, match=rf"cannot decode this target: {reason}.*; leave it out of peers"):
        WeightsFile(TargetModel(model()))


def test_a_full_disk_is_one_sentence_and_leaves_nothing(monkeypatch, tmp_path):
    def full(target: TargetModel, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(llama_cpp, "write_gguf", full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"No space left on device\); make room there, or set TMPDIR"):
        WeightsFile(TargetModel(tiny_model()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", DECODED)
def test_llama_cpp_writes_the_greedy_text_of_our_loop(family):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    target = TargetModel(MODELS[family]())
    prompts = random_prompts([9, 40])
    ours = generate(target, Autoregressive(), prompts, 20)
    weights = WeightsFile(target)
    of_parameters = 4 * sum(one.numel() for one in target.model.parameters())  # tied ones once
    assert of_parameters < weights.path.stat().st_size < of_parameters + 5000
    for name in LLAMA_CPP:
        theirs = build_baseline(name, target, PromptLookup(draft_tokens=5), copies=SimpleNamespace(file=weights))(
            prompts, 20
        )
        for a, b in zip(ours, theirs, strict=True):
            assert (a.tokens, a.finish_reason) == (b.tokens, b.finish_reason)
            assert b.target_forwards == len(b.tokens) - 1 - sum(b.accepted)
    folder = weights.path.parent
    del weights
    assert not folder.exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_llama_cpp_decodes_in_the_dtype_of_the_target(dtype):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    target = TargetModel(tiny_model().to(dtype))
    (ours,) = generate(target, Autoregressive(), random_prompts([9]), 3)
    (theirs,) = build_baseline("llama_cpp", target)(random_prompts([9]), 3)
    assert theirs.tokens == ours.tokens
