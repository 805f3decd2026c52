"""The SPIRe drafter: the batched rollout against the definition, its start against the target, its memory."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from spectrain.errors import UserError
from spectrain.models.pruned_init import last_layers, new_drafter
from spectrain.models.rollout import rollout
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.target import TargetModel
from spectrain.target.lean import shape_of
from spectrain.target.llama import attention, grouped
from spectrain.target.target import FINAL
from tests.conftest import VOCAB_SIZE, in_turn, tiny_model
from tests.models.spire_reference import slow_rollout

PREVIOUS = {"input": "projected", "unembedding": "target", "previous_state": True}
ENGINE = {**PREVIOUS, "own_key": False, "sink_tokens": 0}
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def make(
    family: str = "llama",
    init: str = "pruned",
    n_target_layers: int = 3,
    biases: bool = False,
    tied: bool = False,
    **options,
) -> tuple[TargetModel, SpireDrafter]:
    """A tiny target of this family, which captures what the drafter needs, and a drafter with uneven feedback."""
    more = {"attention_bias": True, "mlp_bias": True} if biases else {}
    model = tiny_model(family, num_hidden_layers=n_target_layers, tie_word_embeddings=tied, **more)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    options = {"k": 4, "window_tokens": 8, "sink_tokens": 1, **options}
    config = SpireConfig(shape_of(model), options.pop("target_layers", last_layers(model, 2)), **options)
    kept = None
    if config.draft_vocab:
        kept = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))[: config.draft_vocab]
    drafter = new_drafter(TargetModel(model), config, init, kept)
    if config.feedback:
        with torch.no_grad():
            uneven = torch.tensor([[0.7, -0.2, 0.4], [0.1, 0.9, -0.5]])
            drafter.feedback_weight.copy_(uneven[: len(drafter.feedback_weight)])
    if config.input != "tied":  # as after a fit: of the size of a block's input
        (drafter.input if config.input == "projected" else drafter.embed_tokens).weight.data.normal_()
    return TargetModel(model, capture_layers=config.captured_layers), drafter.eval().requires_grad_(False)


def test_blocks_of_gemma_compute_what_the_targets_own_do():
    """One has full attention and the other a window, so their RoPE differs; the text is no longer than the window."""
    target, drafter = make("gemma3", input="projected", unembedding="target")
    for name, parameter in target.model.named_parameters():
        if "norm" in name:
            parameter.normal_()
    drafter = new_drafter(target, drafter.config, "pruned")
    states = target.model(torch.tensor([[7, 8, 9, 10]]), output_hidden_states=True).hidden_states
    rope, mask = drafter.rope(torch.arange(4)[None]), torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    x = states[1]  # what the block behind the first one reads
    for block in drafter.blocks:
        queries, own = block.queries_keys_values(x, rope)
        x = block.after_attention(x, attention(queries, own.keys, own.values, grouped(mask, block.shape)))
    torch.testing.assert_close(drafter.norm(x), states[-1], rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="input=tied cannot scale embeddings"):
        make("gemma3")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"feedback": False},
        {"feedback": "shared", "target_layers": (FINAL, FINAL)},
        {"target_layers": (0, 0)},
        {"sink_tokens": 3, "k": 3, "window_tokens": 5},
        {"sink_tokens": 0, "window_tokens": 4},
        {"k": 1},
        {"window_tokens": 100},
        {"family": "llama_gqa"},
        {"family": "qwen3"},
        {"input": "projected", "unembedding": "target"},
        {"input": "trained", "unembedding": "target"},
        PREVIOUS,
        {**PREVIOUS, "feedback": False, "sink_tokens": 3, "k": 3, "window_tokens": 5},
        ENGINE,
        {"own_key": False, "sink_tokens": 2, "k": 3, "window_tokens": 5, "feedback": False},
    ],
    ids=str,
)
def test_batched_rollout_equals_the_definition(options):
    target, drafter = make(**options)
    drafter.double()  # rounding must not hide a wrong key
    tokens = torch.randint(0, VOCAB_SIZE, (2, 27))  # longer than windows, no multiple of k or of a chunk
    captured = target.features(tokens).captured.double()
    batched = rollout(drafter, tokens, captured)
    for row in range(2):
        torch.testing.assert_close(
            batched[row], slow_rollout(drafter, tokens[row], captured[row]), atol=1e-6, rtol=1e-6
        )


@pytest.mark.parametrize(
    ("options", "first_root"),
    in_turn([{}, {"feedback": False, "sink_tokens": 3}, {"window_tokens": 100}, PREVIOUS, ENGINE], [1, 2, 3]),
    ids=str,
)
def test_blocks_may_begin_anywhere(options, first_root):
    target, drafter = make(**options)
    drafter.double()
    tokens = torch.randint(0, VOCAB_SIZE, (2, 27))
    captured = target.features(tokens).captured.double()
    batched = rollout(drafter, tokens, captured, first_root=first_root)
    assert batched.shape[1] == 27
    for row in range(2):
        slow = slow_rollout(drafter, tokens[row], captured[row], first_root=first_root)
        torch.testing.assert_close(batched[row], slow, atol=1e-6, rtol=1e-6)


PACKED = [[6, 1, 2, 18], [22, 5]]  # tokens of the documents of each row
PACKED_OPTIONS = [
    {},
    {"sink_tokens": 3, "k": 3, "window_tokens": 5},
    {"sink_tokens": 0, "window_tokens": 4},
    {"window_tokens": 100, "family": "llama_gqa"},
    PREVIOUS,
    ENGINE,
    {"feedback": False, "target_activations": False},
]


@pytest.mark.parametrize("options", PACKED_OPTIONS, ids=str)
def test_packed_documents_are_rolled_out_as_each_alone(options):
    """Documents of one token, within a block, across chunks and longer than the window; blocks lie as in the row."""
    target, drafter = make(**options)
    drafter.double()
    first_root, tokens = 2, torch.randint(0, VOCAB_SIZE, (len(PACKED), 27))
    starts = torch.tensor([[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)] for row in PACKED])
    reads = drafter.config.target_activations
    captured = target.features(tokens, starts).captured.double() if reads else None
    batched = rollout(drafter, tokens, captured, first_root=first_root, starts=starts)
    for row, lengths in enumerate(PACKED):
        for i, n_tokens in enumerate(lengths):
            start = sum(lengths[:i])
            document = slice(start, start + n_tokens)
            of_target = captured[row, document] if reads else None
            k = drafter.config.k if reads else n_tokens
            slow = slow_rollout(drafter, tokens[row, document], of_target, k, (first_root - start) % k if reads else 0)
            torch.testing.assert_close(batched[row, document], slow, atol=1e-6, rtol=1e-6)


def test_rollout_without_target_activations_is_a_sparse_transformer():
    """With one block as long as the row and no feedback, every key is the drafter's own input: the definition's own
    ordinary Transformer."""
    _, drafter = make(feedback=False, target_activations=False)
    drafter.double()
    tokens = torch.randint(0, VOCAB_SIZE, (1, 21))
    hidden = rollout(drafter, tokens, None)
    expected = slow_rollout(drafter, tokens[0], None, k=21)
    torch.testing.assert_close(hidden[0], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("biases", [False, True])
def test_first_step_of_a_pruned_drafter_equals_the_target_s_own_modules(biases):
    """Root embedding in; K/V of earlier positions from the target's block inputs, of the root from its own x."""
    target, drafter = make(feedback=False, window_tokens=64, k=4, biases=biases)
    model, length = target.model, 13
    tokens = torch.randint(0, VOCAB_SIZE, (1, length))
    captured = target.features(tokens).captured
    root = length - 1  # 12: a multiple of k, so the last token is the root of a block
    x = model.model.embed_tokens(tokens[:, root:])
    positions = torch.arange(length)[None]
    cos, sin = model.model.rotary_emb(x, positions)
    for i, layer_index in enumerate(drafter.config.target_layers):
        layer = model.model.layers[layer_index]
        attention = layer.self_attn
        inputs = layer.input_layernorm(torch.cat([captured[:, :root, i], x], dim=1))
        projected = [getattr(attention, f"{n}_proj")(inputs) for n in "qkv"]
        query, key, value = (t.view(1, length, -1, attention.head_dim).transpose(1, 2) for t in projected)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        key, value = (repeat_kv(t, attention.num_key_value_groups) for t in (key, value))
        weights = (query[:, :, -1:] @ key.transpose(2, 3) * attention.scaling).softmax(-1)
        x = x + attention.o_proj((weights @ value).transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    expected = model.lm_head(model.model.norm(x))[0, 0]
    hidden = rollout(drafter, tokens, captured)
    torch.testing.assert_close(drafter.lm_head(hidden[0, root]), expected, **TOLERANCE)


def test_a_drafter_with_other_memories_has_the_target_s_last_blocks_too():
    (_, usual), (_, other) = make(), make(target_layers=(FINAL, FINAL))
    blocks = zip(usual.blocks.state_dict().values(), other.blocks.state_dict().values(), strict=True)
    assert all(torch.equal(one, same) for one, same in blocks)


@pytest.mark.parametrize("options", [{}, PREVIOUS], ids=str)
def test_target_s_activation_of_the_root_does_not_leak(options):
    target, drafter = make(**options)
    tokens = torch.randint(0, VOCAB_SIZE, (1, 24))
    captured = target.features(tokens).captured
    changed = captured.clone()
    changed[:, 20:] += 1.0  # the root of the last block and everything after it
    torch.testing.assert_close(rollout(drafter, tokens, changed), rollout(drafter, tokens, captured))


def test_memory_of_training_grows_linearly_in_the_row():
    """No L x L mask and no L x L score survives: bytes kept for the backward pass double with the row."""
    target, drafter = make(window_tokens=16)
    drafter.requires_grad_(True)

    def kept(n_tokens: int) -> int:
        sizes = {}
        tokens = torch.randint(0, VOCAB_SIZE, (1, n_tokens))

        def note(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            hidden = rollout(drafter, tokens, target.features(tokens).captured)  # noqa: F841  keeps the graph alive
        return sum(sizes.values())

    first, second, third = kept(64), kept(128), kept(256)
    assert 1.8 < second / first < 2.05
    assert 1.8 < third / second < 2.05


def test_a_token_of_a_long_row_sees_its_window_alone():
    target, drafter = make(sink_tokens=0)
    drafter.double().rope.inv_freq = drafter.rope.inv_freq.double()  # or angles of 5,000 tokens are rounded
    tokens, captured = torch.randint(0, VOCAB_SIZE, (1, 5003)), torch.randn(1, 5003, 2, 32, dtype=torch.float64)
    whole = rollout(drafter, tokens, captured, first_root=1)
    part = rollout(drafter, tokens[:, 4801:], captured[:, 4801:])  # where a block begins
    torch.testing.assert_close(part[:, 8:], whole[:, 4809:], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(part[:, 1:4], whole[:, 4802:4805])  # which miss what the window held


def test_documents_of_a_long_row_do_not_see_each_other():
    target, drafter = make(**PREVIOUS)
    tokens, other = torch.randint(0, VOCAB_SIZE, (2, 1, 5003))
    other[:, 2501:] = tokens[:, 2501:]
    starts = torch.zeros_like(tokens)
    starts[:, 2501:], starts[:, 2502:], starts[:, 4902:] = 2501, 2502, 4902
    one, two = (rollout(drafter, t, target.features(t, starts).captured, starts=starts) for t in (tokens, other))
    assert torch.equal(one[:, 2501:], two[:, 2501:])
    assert not torch.equal(one[:, :2501], two[:, :2501])


def test_targets_that_are_not_llama_like_are_named():
    with pytest.raises(UserError, match="gpt_neox is not computed like Llama"):
        shape_of(tiny_model("gpt_neox"))
    with pytest.raises(UserError, match="gemma is not computed like Llama"):
        shape_of(tiny_model("gemma"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 9}, "k=9 is larger than window_tokens=8"),
        ({"previous_state": True}, "previous_state=true needs input=projected or trained, and target_activations=true"),
        ({"own_key": False, "feedback": False, "target_activations": False}, "own_key=false needs target_activ"),
        ({"own_key": False, "k": 1, "window_tokens": 1}, "own_key=false needs window_tokens of 2 or more"),
        ({"unembedding": "target"}, "input=tied trains its own unembedding; give unembedding=trained"),
    ],
)
def test_impossible_configs_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        make(**options)


def test_the_target_s_tables_are_no_part_of_a_drafter():
    target, drafter = make(input="projected", unembedding="target")
    assert {name.split(".")[0] for name in drafter.state_dict()} == {"input", "blocks", "norm", "feedback_weight"}
    assert copy.deepcopy(drafter).unembedding.data_ptr() == target.unembedding.data_ptr()
