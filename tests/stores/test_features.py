"""The store of activations: what is written is read, damage is named, what does not fit is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from spectrain.errors import UserError
from spectrain.stores.features import (
    FeatureManifest,
    FeatureStore,
    Shard,
    dequantise,
    newest_features,
    open_features,
    quantise,
    shard_name,
    write_shard,
)
from spectrain.stores.folder import write_manifest

D, LAYERS = 16, [1, 3]
LENGTHS = [[5, 2], [1], [7, 3, 4]]  # of the rows of three shards


def random_shard(lengths: list[int], seed: int, dtype: str = "bfloat16") -> Shard:
    generator = torch.Generator().manual_seed(seed)
    n_tokens = sum(lengths)
    captured = torch.randn(n_tokens, len(LAYERS), D, generator=generator) * 10
    hidden = torch.randn(n_tokens, D, generator=generator)
    captured[0, 0] = 0  # a vector without a largest entry
    stored = [captured.bfloat16(), hidden.bfloat16()]
    if dtype == "int8":
        (captured, captured_scale), (hidden, hidden_scale) = quantise(captured), quantise(hidden)
        stored = [captured, hidden, captured_scale, hidden_scale]
    return Shard(
        torch.randint(0, 99, (n_tokens,), generator=generator, dtype=torch.int32),
        torch.tensor([0, *lengths]).cumsum(0),
        torch.tensor([length % 2 == 0 for length in lengths]),
        torch.zeros(len(lengths), dtype=torch.int32),
        *stored,
    )


def write_store(folder: Path, shards: list[Shard], **facts) -> Path:
    folder.mkdir(parents=True)
    for index, shard in enumerate(shards):
        write_shard(folder / shard_name(index), shard)
    rows = [len(shard.held_out) for shard in shards]
    known = {
        "target": "tiny",
        "target_fingerprint": "a" * 16,
        "tokenizer_fingerprint": "b" * 16,
        "layers": LAYERS,
        "hidden_size": D,
        "dtype": "bfloat16",
        "precision": "32-true",
        "row_tokens": 7,
        "source": {"kind": "corpus", "corpus": "stdlib"},
        "config": {},
        "counts": {"rows": sum(rows), "held_out": 0, "tokens": sum(len(shard.tokens) for shard in shards)},
        "shard_rows": rows,
    }
    write_manifest(folder, FeatureManifest(**(known | facts)))
    return folder


@pytest.fixture
def shards() -> list[Shard]:
    return [random_shard(lengths, seed) for seed, lengths in enumerate(LENGTHS)]


@pytest.fixture
def folder(shards, tmp_path) -> Path:
    return write_store(tmp_path / "store", shards)


def test_rows_come_back_as_they_were_written(folder, shards):
    store = open_features(folder)
    assert store.lengths.tolist() == [5, 2, 1, 7, 3, 4]
    assert store.held_out.tolist() == [False, True, False, False, False, True]
    for name in ("tokens", "captured", "final_hidden"):
        written = torch.cat([getattr(shard, name) for shard in shards])
        assert torch.equal(torch.cat([getattr(store.read(row), name) for row in range(len(store))]), written)
    assert torch.equal(store.tokens(3), store.read(3).tokens)


def test_a_part_of_a_row_and_of_the_layers_is_read(folder, shards):
    store = open_features(folder)
    row = store.read(3, n_tokens=4, layers=(3,))
    assert torch.equal(row.captured, shards[2].captured[:4, 1:])
    assert torch.equal(row.final_hidden, shards[2].final_hidden[:4])
    assert store.read(3, layers=()).captured is None
    assert len(store.read(2, n_tokens=4).tokens) == 1


def test_int8_is_off_by_half_a_step_at_most_and_by_bfloat16(tmp_path):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(50, D, generator=generator) * torch.logspace(-4, 4, 50)[:, None]
    x[0] = 0
    q, scale = quantise(x)
    assert torch.equal(q[0], torch.zeros(D, dtype=torch.int8))
    assert torch.equal(scale[1:], x[1:].abs().amax(1) / 127)
    bound = scale[:, None] / 2 * 1.001 + x.abs() * 2**-8
    assert ((dequantise(q, scale).float() - x).abs() <= bound).all()
    store = open_features(write_store(tmp_path / "store", [random_shard(LENGTHS[0], 0, "int8")], dtype="int8"))
    exact = random_shard(LENGTHS[0], 0)
    for row, place in ((0, slice(0, 5)), (1, slice(5, 7))):
        found = store.read(row, layers=LAYERS)
        assert found.captured.dtype == torch.bfloat16
        torch.testing.assert_close(found.captured, exact.captured[place], rtol=0.02, atol=0.2)
        torch.testing.assert_close(found.final_hidden, exact.final_hidden[place], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_flipped_byte_is_found_and_its_shard_named(folder, index):
    file = folder / shard_name(index)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"store/shard-0000{index}\.safetensors is damaged: it is not what the mani"):
        open_features(folder)
    ranks = [open_or_sentence(folder, rank=rank, world_size=2) for rank in range(2)]
    assert [isinstance(found, FeatureStore) for found in ranks] == [rank != index % 2 for rank in range(2)]
    assert len(open_features(folder, verify=False)) == 6


def open_or_sentence(folder: Path, **options) -> FeatureStore | str:
    try:
        return open_features(folder, **options)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("verify", [True, False])
def test_a_missing_or_short_shard_is_named(folder, verify):
    file = folder / shard_name(1)
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "store/shard-00001.safetensors is damaged" in open_or_sentence(folder, verify=verify)
    file.unlink()
    sentence = open_or_sentence(folder, verify=verify)
    assert sentence.startswith(f"data.path={folder} lacks shard-00001.safetensors; run python -m data_prep.activations")
    assert sentence.endswith("again with fresh=true")  # without, that command says that the store is finished


def test_another_target_and_missing_layers_are_refused(folder):
    store = open_features(folder)
    store.check_fits("a" * 16, "tiny", (3,), 99)
    with pytest.raises(UserError, match=r"of the target tiny \(aaaaaaaaaaaaaaaa\), not of big \(cccccccccccccccc\)"):
        store.check_fits("c" * 16, "big", (3,), 99)
    with pytest.raises(UserError, match=r"blocks \[1, 3\], but the drafter reads \[2, 3\]; .* layers=\[2,3\]$"):
        store.check_fits("a" * 16, "tiny", (2, 3), 99)


def test_the_newest_store_that_fits_is_found(tmp_path, shards):
    with pytest.raises(UserError, match="holds no activations of this target's blocks"):
        newest_features(tmp_path, "a" * 16, (1,))
    write_store(tmp_path / "a", shards)
    write_store(tmp_path / "b", shards, target_fingerprint="c" * 16)
    write_store(
        tmp_path / "c",
        [dataclasses.replace(one, captured=one.captured[:, :1].contiguous()) for one in shards],
        layers=[1],
    )
    assert newest_features(tmp_path, "a" * 16, (1, 3)) == tmp_path / "a"
    assert newest_features(tmp_path, "a" * 16, (1,)) == tmp_path / "c"
    with pytest.raises(UserError, match=r"layers=\[0,1\]"):
        newest_features(tmp_path, "a" * 16, (0, 1))
