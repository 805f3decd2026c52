"""DFlash drafters: blocks as z-lab defines them, folders of ours byte by byte, and those of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from spectrain.errors import UserError
from spectrain.methods.options import given_artifacts
from spectrain.models import eagle3
from spectrain.models.artifacts import published_kind
from spectrain.models.dflash import DFlashDrafter, default_layers, drafted, load, save
from spectrain.target import TargetModel
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.models.test_artifacts import tiny_tokenizer
from tests.models.tiny_dflash import export_dflash, new_dflash

N_TOKENS, SIZE = 20, 4
CASES = [{}, {"draft_vocab": 20}, {"draft_vocab": 20, "unembedding": "trained"}, {"unembedding": "trained"}]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama_gqa"), tiny_tokenizer())


def texts(n_states: int = 3) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    tokens = torch.randint(4, VOCAB_SIZE, (2, N_TOKENS), generator=draws)
    return tokens, torch.randn(2, N_TOKENS, n_states, 32, generator=draws)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def block_by_definition(weights: dict[str, Tensor], embedding: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
    """Final states [B, D] of the block whose root is the last of the tokens [a + 1], from z-lab's names of weights."""
    a, n_head, n_kv, width = len(tokens) - 1, 4, 2, 8
    context = rms(states[:a].flatten(1) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    x = embedding[torch.cat([tokens[-1:], torch.full((SIZE - 1,), VOCAB_SIZE - 1)])]
    angles = (torch.arange(a + SIZE)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)[None]
    cos, sin = angles.cos(), angles.sin()
    for i in range(2):
        of = {name.removeprefix(f"layers.{i}."): one for name, one in weights.items()}
        h = rms(x, of["input_layernorm.weight"])
        seen = torch.cat([context, h])
        inputs = {"q": h, "k": seen, "v": seen}
        q, k, v = ((y @ of[f"self_attn.{n}_proj.weight"].T).unflatten(1, (-1, width)) for n, y in inputs.items())
        q, k = rms(q, of["self_attn.q_norm.weight"]), rms(k, of["self_attn.k_norm.weight"])
        q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
        q = apply_rotary_pos_emb(q, q, cos[:, a:], sin[:, a:])[0]
        k = apply_rotary_pos_emb(k, k, cos, sin)[0]
        k, v = (one.repeat_interleave(n_head // n_kv, 1) for one in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
        x = x + attended @ of["self_attn.o_proj.weight"].T
        h = rms(x, of["post_attention_layernorm.weight"])
        inner = F.silu(h @ of["mlp.gate_proj.weight"].T) * (h @ of["mlp.up_proj.weight"].T)
        x = x + inner @ of["mlp.down_proj.weight"].T
    return rms(x, weights["norm.weight"])


@pytest.mark.parametrize(("every", "first_root"), [(1, 0), (3, 1), (5, 4)])
def test_drafts_from_many_roots_are_the_blocks_of_the_definition(target, tmp_path, monkeypatch, every, first_root):
    """In a row of two documents, each of which sees itself only; scores are computed in pieces."""
    monkeypatch.setattr("spectrain.models.root_attention.MOST_SCORES", {"cpu": 2000})
    drafter, (tokens, states) = new_dflash(target), texts()
    save(tmp_path, drafter)
    weights, embedding = load_file(tmp_path / "model.safetensors"), target.model.get_input_embeddings().weight
    starts = torch.tensor([[0] * 9 + [9] * 11, [0] * 20])
    found = torch.stack(drafted(drafter, tokens, states, every, first_root, starts), dim=2)
    for row in range(2):
        for r, root in enumerate(range(first_root, N_TOKENS, every)):
            whole = slice(int(starts[row, root]), root + 1)
            expected = block_by_definition(weights, embedding, tokens[row, whole], states[row, whole])[1:]
            torch.testing.assert_close(found[row, r], expected, rtol=1e-4, atol=1e-4)


def said(drafter: DFlashDrafter) -> Tensor:
    return drafter.spread(F.linear(torch.stack(drafted(drafter, *texts())), drafter.unembedding), -1e9)


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_opened_and_exported_byte_by_byte(tmp_path, target, options, dtype):
    folders = export_dflash(tmp_path / "first", target, drafter := new_dflash(target, **options)), tmp_path / "again"
    save(folders[0], drafter, dtype)
    opened = load(folders[0], target)
    save(export_dflash(folders[1], target, opened), opened, dtype)
    files = sorted(file.name for file in folders[0].iterdir())
    assert files == sorted(file.name for file in folders[1].iterdir())
    assert [name for name in files if (folders[0] / name).read_bytes() != (folders[1] / name).read_bytes()] == []
    assert opened.config == drafter.config
    if dtype == torch.float32:
        assert torch.equal(said(opened), said(drafter))


def published(folder: Path, drafter: DFlashDrafter, change: Callable[[dict, dict], object]) -> Path:
    """A folder as others write it: ours, without what is ours alone, after `change(config, tensors)`."""
    folder.mkdir()
    save(folder, drafter)
    (folder / "kept.npy").unlink(missing_ok=True)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    del config["unembedding"]
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def zlab(config: dict, tensors: dict) -> None:
    config |= {"num_target_layers": 3, "sliding_window": None, "use_sliding_window": False}


def unnamed(config: dict, tensors: dict) -> None:
    del config["dflash_config"]["target_layer_ids"]


def speculators(config: dict, tensors: dict) -> None:
    inside = config.pop("dflash_config")
    layer = {name: config.pop(name) for name in list(config) if name not in ("block_size", "draft_vocab_size")}
    config |= {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "sample_from_anchor": False}
    config |= {"transformer_layer_config": layer, "mask_token_id": inside["mask_token_id"]}
    config["aux_hidden_state_layer_ids"] = [1 + output for output in inside["target_layer_ids"]]
    tensors["embed_tokens.weight"] = tiny_model("llama_gqa").model.embed_tokens.weight.detach().clone()


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("layout", [zlab, speculators])
def test_a_folder_of_others_drafts_as_what_it_was_made_of(tmp_path, target, layout, options):
    drafter = new_dflash(target, **options)
    folder = published(tmp_path / "theirs", drafter, layout)
    assert published_kind(folder) == "dflash"
    assert given_artifacts(str(folder)) == {"dflash": str(folder)}
    torch.testing.assert_close(said(load(folder, target)), said(drafter), rtol=0, atol=0)
    with pytest.raises(UserError, match="is a drafter of DFlash, which is not read; give one of EAGLE-3"):
        eagle3.load(folder, target)


def test_layers_that_a_folder_does_not_name_are_those_of_zlab(tmp_path, target, caplog):
    assert default_layers(36, 5) == (2, 10, 18, 26, 34)
    folder = published(tmp_path / "theirs", new_dflash(target), unnamed)
    with pytest.raises(UserError, match="fc.weight"):  # two layers, but fc is of three
        load(folder, target)
    assert "it names no layers, so it reads the inputs of blocks (1, 2)" in caplog.text


def inside(**values) -> Callable[[dict, dict], None]:
    return lambda config, tensors: config["dflash_config"].update(values)


def outside(**values) -> Callable[[dict, dict], None]:
    return lambda config, tensors: config.update(values)


REFUSED = [
    (outside(layer_types=["sliding_attention", "full_attention"]), "with sliding windows, which is not read"),
    (inside(use_swa=True), "with sliding windows"),
    (inside(causal=True), "whose blocks are causal"),
    (outside(is_causal=True), "whose blocks are causal"),
    (inside(sample_from_anchor=True), "drafts from its anchor"),
    (inside(attention_sink_bias=True), "with sinks or scaled values"),
    (outside(architectures=["DFlash2DraftModel"]), "a drafter of DFlash 2"),
    (outside(architectures=["DSparkDraftModel"]), "a drafter of DSpark"),
    (inside(mask_token_id=None), "has no mask_token_id or no block_size"),
    (inside(mask_token_id=VOCAB_SIZE), "mask_token=61 must be 0..60"),
    (outside(block_size=1), "block_tokens=1 must be 2 or more"),
    (inside(target_layer_ids=[0, 1, 2]), "reads the input of block 3"),
    (inside(target_layer_ids=[1, 0, -1]), "layers that are not in order"),
    (outside(hidden_size=64), "is for a target of 61 tokens and states of 64, not of 61 and 32"),
    (outside(block_size="many"), "has a config.json that cannot be read"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_computed_otherwise_is_refused(tmp_path, target, change, message):
    with pytest.raises(UserError, match=message):
        load(published(tmp_path / "theirs", new_dflash(target), change), target)
