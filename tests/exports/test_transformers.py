"""`model.generate(custom_generate=<export>/decode)`: what transformers would write, with the drafts of an export."""

from __future__ import annotations

import copy
import gc
import importlib.util
import inspect
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import register_parametrization
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer

from spectrain.decoding import Sampling, generate
from spectrain.errors import UserError
from spectrain.exports import transformers_generate
from spectrain.exports.cards import TEMPLATES
from spectrain.exports.exporting import write_decode
from spectrain.target import TargetModel
from tests.conftest import FAMILIES, VOCAB_SIZE, WINDOWED, noisy_copy, random_prompts, tiny_model
from tests.methods.lookup_export import export_lookup
from tests.models.test_artifacts import export_spire, export_vanilla, tiny_tokenizer

N = 24  # tokens of a continuation
(PROMPT,) = random_prompts([6])
ONE = {"input_ids": torch.tensor([PROMPT])}


def spelling() -> PreTrainedTokenizerFast:
    """A tokenizer of one letter per token, as the stop strings of transformers need it."""
    tokenizer = Tokenizer(models.WordLevel({chr(65 + i): i for i in range(VOCAB_SIZE)}, unk_token="A"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


SPELLING = spelling()


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
    drafter = next(iter(vars(model)["_spectrain"].values()))[1]
    assert list(drafter.method.folders) == ([] if kind == "lookup" else [str(exports[kind])])


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_greedy_text_is_that_of_transformers_in_every_family(family, exports, model):
    model, code = tiny_model(family), str(exports["lookup"] / "decode")
    prompt = {"input_ids": torch.tensor(random_prompts([9])), "max_new_tokens": N, "eos_token_id": None}
    expected = model.generate(**prompt)
    assert torch.equal(model.generate(**prompt, custom_generate=code, trust_remote_code=True), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},  # top_k is 50 by default
        {"top_k": 0},
        {"top_k": 3},
        {"top_k": None, "top_p": 0.6},
        {"top_k": 0, "min_p": 0.2},
        {"temperature": 1.0, "top_k": 4, "top_p": 0.8, "min_p": 0.1},
        {"temperature": 0.5, "top_k": 0},
        {"temperature": 3.0, "top_k": 0, "top_p": 0.9},
        {"temperature": 1e-6},
        {"temperature": 1e-40, "top_k": 0},
    ],
    ids=str,
)
def test_samples_follow_the_distribution_of_transformers(model, ours, options):
    def exact(*tokens: int) -> torch.Tensor:
        """Probabilities of the next token, from the scores that transformers draws it of."""
        warmer = {"temperature": max(options.get("temperature", 1.0), 1e-6)}  # of 1e-40 transformers makes NaN
        shown = {"max_new_tokens": 1, "do_sample": True, "output_scores": True, "return_dict_in_generate": True}
        scores = model.generate(torch.tensor([[*PROMPT, *tokens]]), **shown, **{**options, **warmer}).scores[0]
        return scores[0].double().softmax(-1)

    def fits(counts: torch.Tensor, probs: torch.Tensor) -> bool:
        """A chi-square test, with all rare tokens in one class."""
        assert not counts[probs == 0].any()
        kept = probs * counts.sum() >= 5
        classes = [torch.cat([one[kept], one[~kept].sum()[None]]) for one in (counts.double(), probs * counts.sum())]
        classes = [one[:-1] if not classes[1][-1] else one for one in classes]
        return len(classes[0]) == 1 or chisquare(*classes, sum_check=False).pvalue > 1e-3

    torch.manual_seed(0)
    drawn = ours(ONE, do_sample=True, num_return_sequences=600, max_new_tokens=2, **options)[:, len(PROMPT) :]
    first = drawn[:, 0].bincount(minlength=VOCAB_SIZE)
    assert fits(first, exact())
    likeliest = first.argmax()
    second = drawn[drawn[:, 0] == likeliest, 1].bincount(minlength=VOCAB_SIZE)
    assert fits(second, exact(int(likeliest)))


def test_samples_are_those_of_our_loop_and_of_the_global_seed(model, ours):
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "num_return_sequences": 3}
    torch.manual_seed(5)
    text = ours(ONE, **drawn)
    assert not torch.equal(ours(ONE, **drawn), text)
    torch.manual_seed(5)
    assert torch.equal(ours(ONE, **drawn), text)
    torch.manual_seed(5)
    options = {"seed": int(torch.randint(2**31, ())), "batch_size": 3, "stop_token_ids": ()}
    drafter = next(iter(vars(model)["_spectrain"].values()))[1]
    rows = generate(drafter.method.target, drafter, [PROMPT] * 3, N, Sampling(0.7, 9, 0.9, 0.01, "shared"), **options)
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


def test_lengths_stop_strings_and_the_returned_object(model, ours):
    (whole,) = ours(ONE).tolist()
    assert len(whole) == 6 + N
    assert ours(ONE, max_new_tokens=None, max_length=10).tolist() == [whole[:10]]
    spelt = SPELLING.decode(whole)
    for stop in (spelt[14], [spelt[9:12], spelt[20]], spelt[4:7]):  # the last one begins in the prompt
        options = {"tokenizer": SPELLING, "max_new_tokens": N, "eos_token_id": None}
        expected = model.generate(**ONE, **options, stop_strings=stop)
        assert 6 < expected.shape[1] < 6 + N
        found = ours(ONE, **options, stop_strings=stop, return_dict_in_generate=True)
        assert torch.equal(found.sequences, expected)
        config = GenerationConfig(stop_strings=stop, max_new_tokens=N)
        assert torch.equal(ours(ONE, generation_config=config, tokenizer=SPELLING), expected)


# Every field of transformers' GenerationConfig with a value that is no default, and whether that is taken. A field that
# is not taken is refused by its name; one of a later transformers is, too, and this test asks what to do with it.
FIELD_VALUES = {
    True: {
        "max_length": 9, "max_new_tokens": 5, "max_time": 99.0, "do_sample": True, "temperature": 0.5, "top_k": 3,
        "top_p": 0.5, "min_p": 0.5, "num_return_sequences": 1, "return_dict_in_generate": False, "bos_token_id": 5,
        "eos_token_id": 7, "pad_token_id": 9, "early_stopping": True, "length_penalty": 2.0, "diversity_penalty": 0.5,
        "low_memory": True, "decoder_start_token_id": 4, "num_assistant_tokens": 5, "stop_strings": "Z",
        "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.2, "assistant_lookbehind": 3,
        "target_lookbehind": 3, "assistant_ensemble_weight": 0.5, "max_matching_ngram_size": 3,
        "speculation_type": "x", "disable_compile": True, "transformers_version": "5.0.0",
    },
    False: {
        "min_length": 9, "min_new_tokens": 9, "num_beams": 2, "use_mtp": True, "use_cache": False, "cache_config": {},
        "cache_implementation": "static", "max_cache_len": 99, "top_h": 0.5, "typical_p": 0.5, "epsilon_cutoff": 0.1,
        "eta_cutoff": 0.1, "repetition_penalty": 1.2, "encoder_repetition_penalty": 1.2, "no_repeat_ngram_size": 2,
        "bad_words_ids": [[5]], "renormalize_logits": True, "forced_bos_token_id": 5, "forced_eos_token_id": 5,
        "remove_invalid_values": True, "exponential_decay_length_penalty": (1, 1.1), "suppress_tokens": [5],
        "begin_suppress_tokens": [5], "sequence_bias": {(5,): 1.0}, "token_healing": True, "guidance_scale": 1.5,
        "watermarking_config": {"bias": 2.0}, "output_attentions": True, "output_hidden_states": True,
        "output_scores": True, "output_logits": True, "encoder_no_repeat_ngram_size": 2, "is_assistant": True,
        "prompt_lookup_num_tokens": 3, "assistant_early_exit": 1, "compile_config": CompileConfig(),
        "continuous_batching_config": {}, "penalty_alpha": 0.6, "dola_layers": "low", "num_beam_groups": 2,
        "constraints": [1], "force_words_ids": [[5]], "prefill_chunk_size": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in vars(GenerationConfig()) if name[0] != "_"])
def test_every_option_of_generation_does_what_it_does_in_transformers_or_is_refused(model, ours, name):
    ((is_taken, value),) = [(taken, fields[name]) for taken, fields in FIELD_VALUES.items() if name in fields]
    options = {"max_new_tokens": None, "eos_token_id": None, "tokenizer": SPELLING, name: value}
    if is_taken and name != "do_sample":
        assert torch.equal(ours(ONE, **options), model.generate(**ONE, **options))
    elif not is_taken:
        with pytest.raises(UserError, match=f"^{name} does not go with"):
            ours(ONE, **options)
        setattr(model.generation_config, name, value)
        with pytest.raises(UserError, match=f"^{name} does not go with .*model.generation_config"):
            ours(ONE)


ARGUMENTS = {
    "logits_processor": [print], "prefix_allowed_tokens_fn": print, "synced_gpus": True, "assistant_model": object(),
    "negative_prompt_ids": ONE["input_ids"], "negative_prompt_attention_mask": ONE["input_ids"],
    "past_key_values": DynamicCache(), "inputs_embeds": torch.zeros(1, 6, 32), "position_ids": ONE["input_ids"],
    "assistant_tokenizer": object(), "logits_to_keep": 3, "misspelt": 1,
}  # fmt: skip
USED = ("self", "inputs", "generation_config", "stopping_criteria", "streamer", "custom_generate", "kwargs")


@pytest.mark.parametrize("name", [*ARGUMENTS, *inspect.signature(GenerationMixin.generate).parameters])
def test_every_other_argument_is_used_or_refused(ours, name):
    if name not in USED:
        with pytest.raises(UserError, match=f"^({name}|cache|past_key_values) does not go with"):
            ours(ONE, **{name: ARGUMENTS[name]})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}, "pad on the left"),
        ({"input_ids": torch.tensor([PROMPT] * 2), "streamer": Watching()}, "give one prompt"),
        ({"input_ids": torch.tensor([PROMPT] * 2), "stopping_criteria": [Watching(9)]}, "give eos_token_id, or one"),
    ],
)
def test_what_a_batch_cannot_have_is_refused(ours, options, said):
    with pytest.raises(UserError, match=said):
        ours(ONE, **options)


def test_another_model_is_refused(exports, model):
    other, code = tiny_model(seed=1), str(exports["spire"] / "decode")
    with pytest.raises(UserError, match="was trained for tiny"):
        other.generate(**ONE, custom_generate=code, trust_remote_code=True)


class Adapter(nn.Module):
    """A layer with two small matrices beside it, as LoRA has them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(layer.in_features, 4), nn.Linear(4, layer.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapt(model):
    layer = model.model.layers[0]
    layer.self_attn.q_proj, layer.mlp.down_proj = Adapter(layer.self_attn.q_proj), Adapter(layer.mlp.down_proj)
    model.lm_head = Adapter(model.lm_head)


def hooked(change):
    return lambda model: model.model.layers[1].register_forward_hook(lambda module, args, x: change(x))


def loaded(**options):
    return lambda model: model.load_state_dict(tiny_model(seed=5).state_dict(), **options)


def negate(module, args, output):
    output["logits"] = -output.logits


ALTERED = {  # what is changed; what runs the model then, or why nothing does
    "hook": (hooked(lambda x: 2 * x), "transformers"),
    "pre-hook": (lambda m: m.lm_head.register_forward_pre_hook(lambda _, args: (args[0] ** 2,)), "transformers"),
    "hook on the whole": (lambda m: m.register_forward_hook(negate), "transformers"),
    "own forward": (lambda m: setattr(m.model.layers[0].mlp, "forward", lambda x: 2 * x), "transformers"),
    "adapters": (adapt, "transformers"),
    "parametrization": (lambda m: register_parametrization(m.lm_head, "weight", nn.Tanh()), "transformers"),
    "plain layers": (lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.Tanh()), "transformers"),
    "numbers of a module": (lambda m: setattr(m.model.norm, "variance_epsilon", 9.0), "transformers"),
    "order": (lambda m: m.model.layers.insert(0, m.model.layers.pop(2)), "cannot verify drafts.*IndexError"),
    "last position": (hooked(lambda x: torch.cat([x[:, :-1], 2 * x[:, -1:]], dim=1)), "otherwise than one by one;"),
    "prompts only": (hooked(lambda x: x * (1 + (x.shape[1] > 1))), "otherwise than one by one;"),
    "training": (lambda m: m.train(), "lean"),
    "dropout": (lambda m: setattr(m.train().model.layers[0].self_attn, "attention_dropout", 0.1), "call model.eval"),
    "checkpoints": (lambda m: m.train().gradient_checkpointing_enable(), "call model.eval"),
    "prompt tuning": (lambda m: setattr(m, "prepare_inputs_for_generation", print), "prepare_inputs_for_generation"),
    "window": (lambda m: setattr(m.config, "sliding_window", 3), "has no windows"),
    "data": (lambda m: m.model.layers[0].mlp.down_proj.weight.data.mul_(2), "lean"),
    "in place": (lambda m: m.model.norm.weight.mul_(torch.linspace(0, 2, 32)), "lean"),
    "loaded": (loaded(), "lean"),
    "loaded anew": (loaded(assign=True), "lean"),
    "new data": (lambda m: setattr(m.model.norm.weight, "data", torch.linspace(0, 2, 32)), "lean"),
    "new tensor": (lambda m: setattr(m.lm_head, "weight", nn.Parameter(-m.lm_head.weight)), "lean"),
    "tied": (lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight), "lean"),
    "frequencies": (lambda m: m.model.rotary_emb.inv_freq.mul_(3), "lean"),
    "other dtype": (lambda m: m.double(), "lean"),
    "recorded": (lambda m: m(ONE["input_ids"], output_hidden_states=True), "lean"),
}


@pytest.mark.parametrize("is_open", [False, True], ids=["before the first call", "behind it"])
@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_model_writes_its_own_text_or_is_refused(model, ours, name, is_open):
    alter, outcome = ALTERED[name]
    torch.manual_seed(1)
    if is_open:
        ours(ONE, "lookup")
    alter(model)
    if outcome not in ("lean", "transformers"):
        with pytest.raises(UserError, match=outcome):
            ours(ONE, "lookup")
        return
    expected = model.generate(**ONE, max_new_tokens=N, eos_token_id=None)
    assert torch.equal(ours(ONE, "lookup"), expected)
    assert vars(model)["_spectrain"].popitem()[1][1].method.target.engine == outcome


def test_a_trained_drafter_follows_its_target_and_comes_back_from_hooks(model, ours):
    before = ours(ONE, "spire")
    hook = model.model.layers[1].register_forward_hook(lambda _, args, x: 2 * x)
    for alter in (lambda: None, hook.remove, lambda: loaded()(model)):
        alter()
        assert torch.equal(ours(ONE, "spire"), model.generate(**ONE, max_new_tokens=N, eos_token_id=None))
    assert not torch.equal(ours(ONE, "spire"), before)


def test_hooks_of_all_modules_and_changed_classes_are_noticed(model, ours, monkeypatch):
    mlp, before = type(model.model.layers[0].mlp), ours(ONE, "lookup")
    options, forward = {"max_new_tokens": N, "eos_token_id": None}, mlp.forward
    with register_module_forward_hook(lambda module, args, x: x**3 if isinstance(module, nn.Linear) else None):
        assert torch.equal(found := ours(ONE, "lookup"), model.generate(**ONE, **options))
    monkeypatch.setattr(mlp, "forward", lambda self, x: 3 * forward(self, x))
    assert torch.equal(ours(ONE, "lookup"), expected := model.generate(**ONE, **options))
    assert not any(torch.equal(one, before) for one in (found, expected))


@pytest.mark.parametrize("part", ["norm.weight", "rotary_emb.inv_freq"])
def test_converted_numbers_that_are_changed_in_place_are_read(model, ours, part):
    model.bfloat16()
    before = ours(ONE, "lookup")
    numbers = attrgetter(part)(model.model).data
    numbers.mul_(torch.linspace(0, 2, len(numbers)))
    exact = copy.deepcopy(model).float().generate(**ONE, max_new_tokens=N, eos_token_id=None)
    assert torch.equal(ours(ONE, "lookup"), exact)
    assert not torch.equal(exact, before)


def test_threads_that_share_a_model_take_turns(ours):
    prompts = [{"input_ids": torch.tensor([prompt])} for prompt in random_prompts([6] * 8)]
    with ThreadPoolExecutor(4) as pool:
        together = [*pool.map(ours, prompts)]
    assert all(torch.equal(text, ours(prompt)) for text, prompt in zip(together, prompts, strict=True))


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
    monkeypatch.setitem(sys.modules, "spectrain.exports.transformers_generate", None)
    spec = importlib.util.spec_from_file_location("code", TEMPLATES / "custom_generate.py")
    with pytest.raises(ImportError, match="install it in this environment by pip install"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
