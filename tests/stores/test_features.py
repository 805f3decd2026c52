"""The store of activations: what is written is read, damage is named, what does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spectrain.errors import UserError
from spectrain.stores.features import (
    FeatureManifest,
    dequantise,
    newest_features,
    open_features,
    quantise,
    shard_name,
    write_shard,
)
from spectrain.stores.folder import write_manifest

D, L, LAYERS = 16, 7, [1, 3]
ROWS = [2, 2, 1]  # of three shards


def random_shard(n_rows: int, seed: int, dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    captured = torch.randn(n_rows, L, len(LAYERS), D, generator=generator) * 10
    hidden = torch.randn(n_rows, L, D, generator=generator)
    captured[0, 0, 0] = 0  # a vector without a largest entry
    tokens = torch.randint(0, 99, (n_rows, L), generator=generator, dtype=torch.int32)
    if dtype == "bfloat16":
        return {"tokens": tokens, "captured": captured.bfloat16(), "final_hidden": hidden.bfloat16()}
    (captured, captured_scale), (hidden, hidden_scale) = quantise(captured), quantise(hidden)
    scales = {"captured_scale": captured_scale, "hidden_scale": hidden_scale}
    return {"tokens": tokens, "captured": captured, "final_hidden": hidden, **scales}


def write_store(folder: Path, shards: list[dict[str, torch.Tensor]], n_held_out: int = 1, **facts) -> Path:
    folder.mkdir(parents=True)
    for index, shard in enumerate(shards):
        write_shard(folder / shard_name(index), shard)
    tokens = torch.cat([shard["tokens"] for shard in shards])
    known = {
        "target": "tiny",
        "target_fingerprint": "a" * 16,
        "tokenizer_fingerprint": "b" * 16,
        "layers": LAYERS,
        "hidden_size": D,
        "dtype": "bfloat16",
        "precision": "32-true",
        "row_tokens": tokens.shape[1],
        "corpus": "stdlib",
        "config": {},
        "counts": {"rows": len(tokens), "held_out": n_held_out, "tokens": tokens.numel()},
        "shard_rows": len(shards[0]["tokens"]),
    }
    write_manifest(folder, FeatureManifest(**(known | facts)))
    return folder


@pytest.fixture
def shards() -> list[dict[str, torch.Tensor]]:
    return [random_shard(n_rows, seed) for seed, n_rows in enumerate(ROWS)]


@pytest.fixture
def folder(shards, tmp_path) -> Path:
    return write_store(tmp_path / "store", shards)


def test_rows_come_back_as_they_were_written_whole_or_in_part(folder, shards):
    store = open_features(folder)
    assert (len(store), store.row_tokens) == (5, 7)
    assert store.held_out.tolist() == [False, False, False, False, True]
    for name in ("tokens", "captured", "final_hidden"):
        written = torch.cat([shard[name] for shard in shards])
        assert torch.equal(torch.stack([getattr(store.read(row), name) for row in range(len(store))]), written)
    assert torch.equal(store.tokens(3), store.read(3).tokens)
    row = store.read(3, n_tokens=4, layers=(3,))
    assert torch.equal(row.captured, shards[1]["captured"][1, :4, 1:])
    assert torch.equal(row.final_hidden, shards[1]["final_hidden"][1, :4])
    assert store.read(3, layers=()).captured is None


def test_int8_is_off_by_half_a_step_at_most_and_by_bfloat16(tmp_path):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(50, D, generator=generator) * torch.logspace(-4, 4, 50)[:, None]
    x[0] = 0
    q, scale = quantise(x)
    assert torch.equal(q[0], torch.zeros(D, dtype=torch.int8))
    assert torch.equal(scale[1:], x[1:].abs().amax(1) / 127)
    bound = scale[:, None] / 2 * 1.001 + x.abs() * 2**-8
    assert ((dequantise(q, scale).float() - x).abs() <= bound).all()
    store = open_features(write_store(tmp_path / "store", [random_shard(2, 0, "int8")], dtype="int8"))
    exact = random_shard(2, 0)
    for row in range(2):
        found = store.read(row, layers=LAYERS)
        assert found.captured.dtype == torch.bfloat16
        torch.testing.assert_close(found.captured, exact["captured"][row], rtol=0.02, atol=0.2)
        torch.testing.assert_close(found.final_hidden, exact["final_hidden"][row], rtol=0.02, atol=0.02)


def test_a_flipped_byte_is_found_and_its_shard_named(folder):
    file = folder / shard_name(1)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"store/shard-00001\.safetensors is damaged: it is not what the mani"):
        open_features(folder)
    assert len(open_features(folder, verify=False)) == 5


@pytest.mark.parametrize("verify", [True, False])
def test_a_missing_or_short_shard_is_named(folder, verify):
    file = folder / shard_name(1)
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"store/shard-00001.safetensors is damaged"):
        open_features(folder, verify)
    file.unlink()
    # Without fresh=true, that command says that the store is finished.
    with pytest.raises(UserError, match=r"lacks shard-00001.safetensors; run .*activations again with fresh=true$"):
        open_features(folder, verify)


def test_another_target_and_missing_layers_are_refused(folder):
    store = open_features(folder)
    store.check_fits("a" * 16, "tiny", (3,))
    with pytest.raises(UserError, match=r"of the target tiny \(aaaaaaaaaaaaaaaa\), not of big \(cccccccccccccccc\)"):
        store.check_fits("c" * 16, "big", (3,))
    with pytest.raises(UserError, match=r"blocks \[1, 3\], but the drafter reads \[2, 3\]; .* layers=\[2,3\]$"):
        store.check_fits("a" * 16, "tiny", (2, 3))


def test_the_newest_store_that_fits_is_found(tmp_path, shards):
    with pytest.raises(UserError, match="holds no activations of this target's blocks"):
        newest_features(tmp_path, "a" * 16, (1,))
    write_store(tmp_path / "a", shards)
    write_store(tmp_path / "b", shards, target_fingerprint="c" * 16)
    write_store(
        tmp_path / "c",
        [one | {"captured": one["captured"][:, :, :1].contiguous()} for one in shards],
        layers=[1],
    )
    assert newest_features(tmp_path, "a" * 16, (1, 3)) == tmp_path / "a"
    assert newest_features(tmp_path, "a" * 16, (1,)) == tmp_path / "c"
    with pytest.raises(UserError, match=r"layers=\[0,1\]"):
        newest_features(tmp_path, "a" * 16, (0, 1))
