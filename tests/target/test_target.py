"""Forwards of trees, chunked prefill and captured states against the plain Hugging Face model."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectrain.errors import UserError
from spectrain.target import DraftTree, KVCache, TargetModel
from spectrain.target.llama import PIECE_TOKENS
from spectrain.target.masks import packed_mask
from spectrain.target.modules import TransformersEngine
from spectrain.target.target import FINAL
from tests.conftest import FAMILIES, WINDOWED, random_prompts, tiny_model
from tests.decoding.reference import random_parents, tree_of


def pad(prompts: list[list[int]]) -> torch.Tensor:
    width = max(map(len, prompts))
    return torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])


@pytest.mark.parametrize("lengths", [[11], [6, 6], [5, 19, 1]], ids=str)
def test_tree_forward_equals_separate_forwards_of_its_paths(any_target, lengths):
    generator = torch.Generator().manual_seed(0)
    prompts = random_prompts(lengths)
    target = any_target.with_capture([0, 2])
    cache = KVCache(len(lengths), block_tokens=4)
    target.prefill(pad(prompts), lengths, cache, range(len(lengths)))
    tree = tree_of(random_prompts([9] * len(lengths), seed=1), [random_parents(9, generator) for _ in lengths])
    output = target.score(tree, cache)
    for row, prompt in enumerate(prompts):
        for node in range(9):
            path = torch.nonzero(tree.ancestors[row, node])[:, 0]
            text = torch.tensor([prompt + tree.tokens[row, path].tolist()])
            plain = target.model(text, output_hidden_states=True)
            torch.testing.assert_close(output.logits[row, node], plain.logits[0, -1], rtol=1e-4, atol=1e-4)
            for place, layer in enumerate((0, 2)):
                expected = plain.hidden_states[layer][0, -1]
                torch.testing.assert_close(output.captured[row, node, place], expected, rtol=1e-4, atol=1e-4)
            assert int(output.positions[row, node]) == text.shape[1] - 1


@pytest.mark.parametrize("chunk", [4, 5, 64])
def test_ragged_prefill_in_chunks_equals_plain_forward(any_target, chunk):
    lengths = [3, 17, 8]
    prompts = random_prompts(lengths)
    target = TargetModel(any_target.model, capture_layers=[1], prefill_chunk=chunk)
    output = target.prefill(pad(prompts), lengths, KVCache(3), range(3))
    assert output.logits.shape == (3, 1, target.vocab_size)
    assert output.captured.shape == (3, 17, 1, 32)
    for row, prompt in enumerate(prompts):
        plain = target.model(torch.tensor([prompt]), output_hidden_states=True)
        torch.testing.assert_close(output.logits[row, 0], plain.logits[0, -1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            output.captured[row, : len(prompt), 0], plain.hidden_states[1][0], rtol=1e-4, atol=1e-4
        )


def test_forward_equals_the_model_and_builds_no_mask(family_target, monkeypatch):
    masks = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return attention(*args, attn_mask=attn_mask, **kwargs)

    tokens = torch.tensor(random_prompts([20, 20]))
    plain = family_target.model(tokens, output_hidden_states=True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    output = family_target.with_capture([2, 1]).forward(tokens)
    assert masks == [None] * 3
    torch.testing.assert_close(output.logits, plain.logits)
    torch.testing.assert_close(output.captured, torch.stack([plain.hidden_states[2], plain.hidden_states[1]], dim=2))


def test_packed_documents_of_several_rows_are_texts_of_their_own(any_target, monkeypatch):
    lengths = [[5, 1, 9], [15], [7, 8]]
    tokens = torch.tensor(random_prompts([15, 15, 15]))
    starts = torch.tensor([[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)] for row in lengths])
    target = any_target.with_capture([0, 1])
    positions, mask = packed_mask(starts)
    logits, captured, _ = target._engine.run(tokens, positions, mask=mask, capture_layers=[0, 1])
    masked, features = torch.stack(captured, dim=2), target.features(tokens, starts)
    torch.testing.assert_close(features.captured, masked, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.logits_of(features.final_hidden), logits, rtol=1e-4, atol=1e-4)
    with monkeypatch.context() as elsewhere:  # elsewhere than on a CPU a mask keeps them apart
        elsewhere.setattr(type(target._engine), "device", torch.device("meta"))
        torch.testing.assert_close(target.features(tokens, starts).captured, masked, rtol=1e-4, atol=1e-4)
        elsewhere.setattr("spectrain.target.hidden_states.packed_mask", None)
        with pytest.raises(TypeError):
            target.features(tokens, starts)
    alone = any_target.with_capture([]).features(tokens, starts)
    assert alone.captured is None
    torch.testing.assert_close(alone.final_hidden, features.final_hidden)


def test_positions_past_the_context_do_not_crash(llama_target):
    target = TargetModel(tiny_model("llama", max_position_embeddings=8))
    cache = KVCache(1)
    target.prefill(torch.tensor(random_prompts([6])), [6], cache, range(1))
    output = target.score(DraftTree.chain(torch.tensor([5]), torch.tensor([[6, 7, 8, 9]])), cache)
    assert output.positions.tolist() == [[6, 7, 7, 7, 7]]


def test_given_positions_replace_those_behind_the_cached_tokens(family_target):
    prompts, tokens, positions = random_prompts([6, 9]), [[5, 6, 7], [8, 9, 10]], [[40, 41, 42], [3, 30, 31]]
    cache = KVCache(2)
    family_target.prefill(pad(prompts), [6, 9], cache, range(2))
    chain = DraftTree.chain(torch.tensor([5, 8]), torch.tensor([[6, 7], [9, 10]]))
    output = family_target.score(chain, cache, torch.tensor(positions))
    assert output.positions.tolist() == positions
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([[*range(len(prompt)), *positions[row]]])
        plain = family_target.model(
            torch.tensor([prompt + tokens[row]]),
            position_ids=ids,
            attention_mask=torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril(),
        )
        torch.testing.assert_close(output.logits[row], plain.logits[0, -3:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["lean", "transformers"])
def test_final_states_are_captured_like_the_inputs_of_a_block(engine):
    target = TargetModel(tiny_model("llama"), capture_layers=(1, FINAL), engine=engine)
    tokens, lengths, cache = pad(random_prompts([5, 9])), [5, 9], KVCache(2)
    plain = target.model(tokens, output_hidden_states=True).hidden_states
    read = torch.tensor([[4, 1], [8, 0]])
    captured = target.prefill(tokens, lengths, cache, range(2), read).captured
    for row in range(2):
        torch.testing.assert_close(captured[row, :, 0], plain[1][row, read[row]], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(captured[row, :, 1], plain[-1][row, read[row]], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.features(tokens).captured[:, :, 1], plain[-1], rtol=1e-4, atol=1e-4)
    output = target.score(DraftTree.root_only(torch.tensor([7, 7])), cache)
    torch.testing.assert_close(target.logits_of(output.captured[:, :, 1]), output.logits, rtol=1e-4, atol=1e-4)


def test_capture_layer_out_of_range_is_refused(llama_target):
    with pytest.raises(UserError, match=r"capture layer 3 .* 0\.\.2"):
        llama_target.with_capture([3])


def test_other_than_torchs_own_attention_is_refused():
    with pytest.raises(UserError, match='attn_implementation="sdpa"'):
        TargetModel(tiny_model("llama", attn_implementation="eager"))


def test_kept_hidden_states_are_what_the_unembedding_takes(family_target):
    """Without hooks where a forward is body and unembedding, by a hook elsewhere."""
    target, tree = family_target, DraftTree.root_only(torch.tensor([5]))
    keeping = target.with_hidden()
    engine = TransformersEngine(target.model)
    engine._is_body_and_unembedding = False
    by_hook = TargetModel(target.model, keeps_hidden=True, engine="transformers")
    by_hook._engine = engine
    outputs = []
    for model in (target, keeping, by_hook):
        cache = KVCache(1)
        model.prefill(torch.tensor([[7, 8, 9]]), [3], cache, range(1))
        outputs.append(model.score(tree, cache))
    plain, kept, hooked = outputs
    assert plain.hidden is None
    torch.testing.assert_close(kept.logits, plain.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hooked.logits, plain.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kept.hidden, hooked.hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kept.hidden, target.features(torch.tensor([[7, 8, 9, 5]])).final_hidden[:, -1:])


ROPES = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.5, 1.25, 1.0, 2.0],
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", [*FAMILIES, *WINDOWED, *ROPES])
def test_features_of_long_rows_in_pieces_are_those_of_one_forward(kind, monkeypatch):
    """Rows longer than the windows, and than the texts that frequencies were made for; pieces of odd sizes."""
    monkeypatch.setitem(PIECE_TOKENS, "cpu", 14)
    monkeypatch.setattr("spectrain.target.hidden_states.MOST_MASKED", 20)
    model = tiny_model("llama", rope_parameters=ROPES[kind]) if kind in ROPES else tiny_model(kind)
    target = TargetModel(model, capture_layers=[2, 0], prefill_chunk=11)
    tokens = torch.tensor(random_prompts([101, 101]))
    with torch.no_grad():
        plain = target.model(tokens, output_hidden_states=True)
        found = target.features(tokens)
        for place, layer in enumerate((2, 0)):
            torch.testing.assert_close(found.captured[:, :, place], plain.hidden_states[layer], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(target.logits_of(found.final_hidden), plain.logits, rtol=1e-4, atol=1e-4)
        lengths = [[60, 1, 40], [101]]
        starts = torch.tensor([[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)] for row in lengths])
        packed = target.features(tokens, starts)
        for row, start, n in ((0, 0, 60), (0, 60, 1), (0, 61, 40), (1, 0, 101)):
            alone = target.features(tokens[row : row + 1, start : start + n])
            for one, whole in zip(vars(alone).values(), vars(packed).values(), strict=True):
                torch.testing.assert_close(whole[row, start : start + n], one[0], rtol=1e-4, atol=1e-4)


def test_pieces_are_no_larger_than_they_must_be(monkeypatch):
    """A row that is read in pieces has no state of the width of the MLP, or of the square of its tokens, at once."""
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(one.numel() for one in tree_leaves(out) if isinstance(one, torch.Tensor))
            return out

    monkeypatch.setitem(PIECE_TOKENS, "cpu", 16)
    monkeypatch.setattr("spectrain.target.hidden_states.MOST_MASKED", 20)
    n_tokens = 1000
    for family in ("llama", "gemma3"):
        model = tiny_model(family, max_position_embeddings=2048, intermediate_size=400)
        target = TargetModel(model, capture_layers=[1], prefill_chunk=16)
        with torch.no_grad(), Sizes():
            target.features(torch.tensor(random_prompts([n_tokens])))
        assert max(sizes) <= 64 * n_tokens  # of the cache: keys of 2 heads of 8, of a multiple of 256 slots; x has 32
