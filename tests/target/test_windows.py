"""Targets whose layers have windows, far beyond them: transformers' own texts, by every method and in both dtypes.

`test_target.py` has trees that are deeper than the windows are wide.
"""

import tempfile
from functools import lru_cache
from itertools import product
from pathlib import Path

import pytest
import torch

from spectrain.decoding import generate
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.options import artifact_kinds
from spectrain.methods.registry import method_config, method_names
from spectrain.target import TargetModel
from tests.conftest import WINDOW_TOKENS, WINDOWED, noisy_copy, random_prompts, tiny_model
from tests.decoding.reference import greedy_by_full_forwards, greedy_by_hugging_face
from tests.decoding.test_loop import SMALL
from tests.methods.every import Artifacts, build

N_NEW = 24
LENGTHS = [WINDOW_TOKENS + 600, 5]
LLAMA_LIKE, SPIRE = ("mistral", "gemma3"), {"k": 3, "input": "projected", "unembedding": "target"}
METHODS = [name for name in method_names() if name != "auto"]  # which runs the others

# Every method meets one family, with windows on some layers; every family and dtype meets one method of each sort.
EVERY_SORT = ("autoregressive", "speculative", "spire_tree", "sssd")
EACH = [
    pytest.param(
        *(family, dtype, method),
        marks=() if method in EVERY_SORT or (family, dtype) == ("gemma3", torch.float32) else pytest.mark.slow,
        id=f"{family}-{dtype}-{method}",
    )
    for family, dtype, method in product(WINDOWED, (torch.float32, torch.bfloat16), METHODS)
]


@lru_cache
def artifacts(family: str, dtype: torch.dtype = torch.float32) -> Artifacts:
    model = tiny_model(family, eos_token_id=None).to(dtype)
    if dtype == torch.float32:
        texts = [greedy_by_full_forwards(model, prompt, N_NEW) for prompt in random_prompts(LENGTHS)]
        assert texts == [greedy_by_hugging_face(model, prompt, N_NEW) for prompt in random_prompts(LENGTHS)]
    else:  # in which transformers' own cache and full forwards may differ
        plain = generate(TargetModel(model), Autoregressive(), random_prompts(LENGTHS), N_NEW)
        texts = [generation.tokens for generation in plain]
    made = Artifacts(Path(tempfile.mkdtemp()), model, lambda: noisy_copy(model), lambda: texts, **SPIRE)
    made.texts = texts
    return made


@pytest.mark.parametrize(("family", "dtype", "method"), EACH)
def test_greedy_text_beyond_the_window_is_the_targets_own(family, dtype, method):
    made = artifacts(family, dtype)
    if family not in LLAMA_LIKE and {"spire", "eagle3", "dflash"} & {*artifact_kinds(method_config(method)).values()}:
        pytest.skip("drafters of our own blocks are for targets that are computed like Llama")
    target = TargetModel(made.target.model, made.target.tokenizer, prefill_chunk=250)
    options = {"positions": "text"} if (family, method) == ("gemma3", "magicdec") else {}  # keys turn by two bases
    drafter = build(method, made, SMALL.get(method, {}) | options)
    generations = generate(target, drafter, random_prompts(LENGTHS), N_NEW, batch_size=2, cache_block_tokens=8)
    assert [generation.tokens for generation in generations] == made.texts
