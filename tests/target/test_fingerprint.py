"""One name for one target, whatever it was loaded as; another name for any other."""

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from spectrain.target import fingerprint
from tests.conftest import noisy_copy, tiny_model
from tests.decoding.test_loop import word_tokenizer


def test_survives_saving_and_loading_in_either_dtype(tmp_path):
    model = tiny_model("llama").to(torch.bfloat16)
    model.model.layers[0].self_attn.q_proj.weight[:, ::3] *= 1e-6  # float16 holds these as subnormals
    model.save_pretrained(tmp_path)
    names = {
        fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), word_tokenizer())
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    assert names == {fingerprint(model, word_tokenizer())}
    (name,) = names
    assert len(name) == 16
    assert int(name, 16) >= 0


def test_differs_in_weights_shape_or_tokenizer():
    tokenizer = word_tokenizer()
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"v{i}": i for i in range(61)}, "v0")))
    model = tiny_model("llama")
    names = [
        fingerprint(model, tokenizer),
        fingerprint(model, other),
        fingerprint(model, None),
        fingerprint(noisy_copy(model), tokenizer),
        fingerprint(tiny_model("llama", max_position_embeddings=512), tokenizer),
        fingerprint(tiny_model("llama", rms_norm_eps=1e-3), tokenizer),
        fingerprint(tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}), tokenizer),
    ]
    assert len(set(names)) == len(names)


def test_use_of_the_tokenizer_does_not_change_it():
    tokenizer = word_tokenizer()
    before = fingerprint(tiny_model("llama"), tokenizer)
    tokenizer.pad_token = "w0"
    tokenizer(["w4", "w5 w6"], padding=True, truncation=True, max_length=2)
    assert fingerprint(tiny_model("llama"), tokenizer) == before
    tokenizer.add_tokens(["another"])
    assert fingerprint(tiny_model("llama"), tokenizer) != before
