"""Targets whose layers have windows, far beyond them: transformers' own texts, by every method and in both dtypes."""

import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from spectrain.decoding import KVCache, TargetModel, generate
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.folders import artifact_kinds
from spectrain.methods.registry import method_config, method_names
from tests.conftest import EOS_ID, WINDOW_TOKENS, WINDOWED, noisy_copy, random_prompts, tiny_model
from tests.decoding.reference import greedy_by_full_forwards, greedy_by_hugging_face, random_parents, tree_of
from tests.decoding.test_loop import SMALL
from tests.methods.every import Artifacts, build

N_NEW = 24
LENGTHS = [WINDOW_TOKENS + 600, 5]
SPIRE_FAMILIES, SPIRE = ("mistral", "gemma3"), {"k": 3, "input": "projected", "unembedding": "target"}
METHODS = [name for name in method_names() if name != "auto"]  # which runs the others


@lru_cache
def artifacts(family: str, dtype: torch.dtype = torch.float32) -> Artifacts:
    model = tiny_model(family).to(dtype)
    if dtype == torch.float32:
        texts = [greedy_by_full_forwards(model, prompt, N_NEW, (EOS_ID,)) for prompt in random_prompts(LENGTHS)]
    else:  # in which transformers' own cache and full forwards may differ
        plain = generate(TargetModel(model), Autoregressive(), random_prompts(LENGTHS), N_NEW)
        texts = [generation.tokens for generation in plain]
    made = Artifacts(Path(tempfile.mkdtemp()), model, lambda: noisy_copy(model), lambda: texts, **SPIRE)
    made.texts = texts
    return made


@pytest.mark.parametrize("family", WINDOWED)
def test_texts_are_those_of_transformers_own_cache(family):
    made, prompts = artifacts(family), random_prompts(LENGTHS)
    assert made.texts == [greedy_by_hugging_face(made.target.model, prompt, N_NEW) for prompt in prompts]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", WINDOWED)
def test_greedy_text_beyond_the_window_is_the_targets_own(family, dtype, method):
    made = artifacts(family, dtype)
    if "spire" in artifact_kinds(method_config(method)).values() and family not in SPIRE_FAMILIES:
        pytest.skip("SPIRe drafters are for targets whose blocks they can have")
    target = TargetModel(made.target.model, made.target.tokenizer, prefill_chunk=250)
    options = {"positions": "text"} if (family, method) == ("gemma3", "magicdec") else {}  # keys turn by two bases
    drafter = build(method, made, SMALL.get(method, {}) | options)
    generations = generate(target, drafter, random_prompts(LENGTHS), N_NEW, batch_size=2, cache_block_tokens=8)
    assert [generation.tokens for generation in generations] == made.texts


@pytest.mark.parametrize("family", WINDOWED)
def test_each_node_of_a_tree_sees_the_last_tokens_of_its_own_path(family):
    """Trees are deeper than the window is wide, so nodes leave their own ancestors behind."""
    target, lengths = TargetModel(tiny_model(family), capture_layers=[2]), [11, 30, 2]
    prompts, n_nodes = random_prompts(lengths), 3 * WINDOW_TOKENS
    padded = torch.tensor([prompt + [0] * (30 - len(prompt)) for prompt in prompts])
    cache, generator = KVCache(3, block_tokens=4), torch.Generator().manual_seed(0)
    target.prefill(padded, lengths, cache, range(3))
    parents = [random_parents(n_nodes, generator), list(range(-1, n_nodes - 1)), random_parents(n_nodes, generator)]
    tree = tree_of(random_prompts([n_nodes] * 3, seed=1), parents)
    output = target.score(tree, cache)
    for row, prompt in enumerate(prompts):
        for node in range(n_nodes):
            path = torch.nonzero(tree.ancestors[row, node])[:, 0]
            plain = target.model(torch.tensor([prompt + tree.tokens[row, path].tolist()]), output_hidden_states=True)
            torch.testing.assert_close(output.logits[row, node], plain.logits[0, -1], rtol=1e-3, atol=1e-3)
            inside = plain.hidden_states[2][0, -1]
            torch.testing.assert_close(output.captured[row, node, 0], inside, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", WINDOWED)
def test_packed_documents_have_windows_of_their_own(family):
    target, tokens = TargetModel(tiny_model(family)), torch.tensor(random_prompts([40]))
    starts = torch.tensor([[0] * 25 + [25] * 15])
    masked = target.forward(tokens, starts).logits
    alone = [target.model(part).logits for part in tokens.split([25, 15], dim=1)]
    torch.testing.assert_close(masked, torch.cat(alone, dim=1), rtol=1e-3, atol=1e-3)
    found = target.logits_of(target.features(tokens, starts).final_hidden)
    torch.testing.assert_close(found, masked, rtol=1e-3, atol=1e-3)
