"""`model.generate(custom_generate=<export>/decode)`: what transformers would write, with the drafts of an export."""

from __future__ import annotations

import copy
import gc
import importlib.util
import sys
import weakref

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from spectrain.decoding import Sampling, TargetModel, generate
from spectrain.errors import UserError
from spectrain.serving import transformers_generate
from spectrain.serving.cards import TEMPLATES
from spectrain.serving.exporting import write_decode
from tests.conftest import noisy_copy, random_prompts, tiny_model
from tests.methods.lookup_export import export_lookup
from tests.models.test_artifacts import export_spire, export_vanilla, tiny_tokenizer

N = 24  # tokens of a continuation
(PROMPT,) = random_prompts([6])
ONE = {"input_ids": torch.tensor([PROMPT])}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """An export of each kind for the tiny Llama, by kind."""
    root, target = tmp_path_factory.mktemp("exports"), TargetModel(tiny_model(), tiny_tokenizer())
    folders = {"vanilla": export_vanilla(root / "vanilla", target, noisy_copy(target.model))}
    folders |= {"spire": export_spire(root / "spire", target), "lookup": export_lookup(root / "pld", target, "pld")}
    for folder in folders.values():
        target.tokenizer.save_pretrained(folder)
        write_decode(folder)
    return folders


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tiny_model()


@pytest.fixture
def ours(model, exports):
    """Generates with an export, of a vanilla drafter by default."""

    def call(inputs, kind="vanilla", **options):
        code = {"custom_generate": str(exports[kind] / "decode"), "trust_remote_code": True}
        return model.generate(**{**code, "max_new_tokens": N, "eos_token_id": None, **inputs, **options})

    return call


@pytest.mark.parametrize("kind", ["vanilla", "spire", "lookup"])
def test_greedy_text_is_that_of_transformers_in_a_padded_batch(model, ours, exports, kind):
    prompts, lengths = random_prompts([3, 9, 5]), set()
    ids = torch.tensor([[0] * (9 - len(prompt)) + prompt for prompt in prompts])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    for ends in (None, 7, [7, 20, 21, 22, 23, 24]):
        expected = tiny_model().generate(**inputs, max_new_tokens=N, eos_token_id=ends)
        assert torch.equal(ours(inputs, kind, eos_token_id=ends), expected)
        lengths |= {(row != 0).sum().item() for row in expected}
    assert len(lengths) > 3  # some rows ended before others
    (drafter,) = vars(model)["_spectrain"].values()
    assert list(drafter.folders) == ([] if kind == "lookup" else [str(exports[kind])])


def test_samples_are_those_of_our_loop_and_of_the_global_seed(model, ours):
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "num_return_sequences": 3}
    torch.manual_seed(5)
    text = ours(ONE, **drawn)
    assert not torch.equal(ours(ONE, **drawn), text)
    torch.manual_seed(5)
    assert torch.equal(ours(ONE, **drawn), text)
    torch.manual_seed(5)
    options = {"seed": int(torch.randint(2**31, ())), "batch_size": 3, "stop_token_ids": ()}
    (drafter,) = vars(model)["_spectrain"].values()
    rows = generate(drafter.target, drafter, [PROMPT] * 3, N, Sampling(0.7, 9, 0.9, 0.01, "shared"), **options)
    assert text.tolist() == [PROMPT + row.tokens for row in rows]
    assert torch.equal(ours(ONE, do_sample=True, top_k=1), ours(ONE))


class Watching(BaseStreamer, StoppingCriteria):
    """Records what a streamer and a stopping criterion are told, and stops at a number of tokens."""

    def __init__(self, stops_at: int = 0):
        self.told, self.stops_at = [], stops_at

    def put(self, value):
        self.told.append(value.tolist())

    def end(self):
        self.told.append("end")

    def __call__(self, input_ids, scores, **kwargs):
        self.told.append(input_ids.tolist())
        return torch.tensor([input_ids.shape[1] >= self.stops_at])


@pytest.mark.parametrize("stops_at", [7, 15])  # 7: at the first new token
def test_streamer_and_stopping_criteria_are_told_what_transformers_tells_them(ours, stops_at):
    texts, told = [], []
    for write in (ours, lambda inputs, **options: tiny_model().generate(**inputs, **options, max_new_tokens=N)):
        shown, asked = Watching(), Watching(stops_at)
        options = {"streamer": shown, "stopping_criteria": StoppingCriteriaList([asked]), "eos_token_id": None}
        texts.append(write(ONE, **options))
        told.append((shown.told, asked.told))
    assert torch.equal(*texts)
    assert texts[0].shape == (1, stops_at)
    assert told[0] == told[1]


def test_lengths_stop_strings_and_the_returned_object(ours):
    (whole,) = ours(ONE).tolist()
    assert len(whole) == 6 + N
    assert ours(ONE, max_new_tokens=None, max_length=10).tolist() == [whole[:10]]
    found = ours(ONE, stop_strings=f"<{whole[14]}>", return_dict_in_generate=True)
    assert found.sequences.tolist() == [whole[: whole.index(whole[14], 6) + 1]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 2}, "beam_search does not go with"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation does not go with"),
        ({"assistant_model": object()}, "assistant_model does not go with"),
        ({"past_key_values": DynamicCache()}, "(cache|past_key_values) does not go with"),
        ({"inputs_embeds": torch.zeros(1, 6, 32)}, "inputs_embeds does not go with"),
        ({"logits_processor": [print]}, "logits_processor does not go with"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores does not go with"),
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor would change the logits"),
        ({"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper would change the logits"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}, "pad on the left"),
        ({"input_ids": torch.tensor([PROMPT] * 2), "streamer": Watching()}, "give one prompt"),
    ],
)
def test_what_speculation_does_not_have_is_refused_by_name(ours, options, said):
    with pytest.raises(UserError, match=said):
        ours(ONE, **options)


def test_another_model_is_refused(exports, model):
    other, code = tiny_model(seed=1), str(exports["spire"] / "decode")
    with pytest.raises(UserError, match="was trained for tiny"):
        other.generate(**ONE, custom_generate=code, trust_remote_code=True)


def test_a_drafter_is_opened_once_and_goes_with_its_model(ours, exports, model, monkeypatch):
    opened, load = [], transformers_generate.load_method
    monkeypatch.setattr(transformers_generate, "load_method", lambda *given: opened.append(given[0]) or load(*given))
    assert torch.equal(ours(ONE), ours(ONE))
    assert opened == [exports["vanilla"]]
    other = copy.deepcopy(model)
    assert vars(other)["_spectrain"] == {}
    other.generate(**ONE, custom_generate=str(exports["spire"] / "decode"), trust_remote_code=True, max_new_tokens=4)
    seen, other = weakref.ref(other), None
    gc.collect()
    assert seen() is None


def test_a_missing_spectrain_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "spectrain.serving.transformers_generate", None)
    spec = importlib.util.spec_from_file_location("code", TEMPLATES / "custom_generate.py")
    with pytest.raises(ImportError, match="install it in this environment by pip install"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
