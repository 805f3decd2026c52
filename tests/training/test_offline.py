"""Training from stored features is training with the target beside it: losses, order, resumption."""

from __future__ import annotations

import os
import signal
import threading
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import Callback

from data_prep.capture import ShardParts, autocast
from spectrain.data.packing import Packed, PackedRows
from spectrain.models.pruned_init import new_drafter
from spectrain.models.spire import SpireConfig
from spectrain.stores.features import FeatureStore, open_features
from spectrain.target import TargetModel, fingerprint
from spectrain.target.lean import shape_of
from spectrain.training import drafters as modules
from spectrain.training.callbacks import Checkpoints, TokensPerSecond
from spectrain.training.checkpoints import CheckpointFolder
from spectrain.training.data import FeatureRows, RowBatch, SeededLoader
from spectrain.training.drafters import DrafterTraining
from spectrain.training.losses import LossSettings
from spectrain.training.optim import OptimizerSettings
from spectrain.training.sources import feature_data
from spectrain.training.spire import SpireTraining
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.stores.test_features import write_store
from tests.training.test_eagle3 import eagle3_training
from tests.training.trainers import quiet_trainer

LAYERS = (1, 2)


PROJECTED = {"input": "projected", "unembedding": "target"}
PREVIOUS = {**PROJECTED, "previous_state": True}
EAGLE3 = {"kind": "eagle3", "roots_every": 3}


def captured_store(folder, target: TargetModel, precision: str, dtype: str = "bfloat16"):
    """A store of 14 rows in two shards, in batches unlike those of training; the last three are held out."""
    generator, target = torch.Generator().manual_seed(1), target.with_capture(LAYERS)
    rows = PackedRows(torch.randint(4, VOCAB_SIZE, (14, 16), generator=generator, dtype=torch.int32))
    packed = Packed(rows[:11], rows[11:])
    parts = ShardParts(packed, target, precision, dtype, batch_tokens=70, shard_tokens=8 * 16, facts={})
    assert len(parts.sizes) == 2
    shards, facts = [parts.capture(index) for index in range(2)], {"layers": list(LAYERS), "hidden_size": 32}
    write_store(folder, shards, n_held_out=3, dtype=dtype, precision=precision, **facts)
    return open_features(folder)


def spire_training(target: TargetModel, optimizer: str = "adamw", **options) -> SpireTraining:
    torch.manual_seed(0)
    config = SpireConfig(shape_of(target.model), LAYERS, k=3, window_tokens=6, **options)
    drafter = new_drafter(target, config, "pruned")
    settings = OptimizerSettings(name=optimizer, lr=1e-2, warmup_steps=2)
    fits_input = config.input != "tied"
    return SpireTraining(drafter, target, LossSettings(), settings, roots_every=config.k, fits_input=fits_input)


def training_of(target: TargetModel, kind: str = "spire", **options) -> DrafterTraining:
    return {"spire": spire_training, "eagle3": eagle3_training}[kind](target, **options)


def all_rows(store: FeatureStore, layers: tuple[int, ...] = LAYERS) -> FeatureRows:
    return FeatureRows(store, np.arange(len(store)), layers, row_tokens=16)


def online(batch: RowBatch) -> RowBatch:
    """The same rows without what was stored."""
    return RowBatch(batch.tokens, batch.numbers)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"target_activations": False, "feedback": False}, {"input": "trained", "unembedding": "target"}),
        *(PREVIOUS, {"kind": "eagle3", "fc_norm": True}),
    ],
    ids=str,
)
def test_losses_are_those_of_online_training(tmp_path, precision, options):
    target = TargetModel(tiny_model("llama", initializer_range=0.1))
    store = captured_store(tmp_path / "store", target, precision)
    module = training_of(target, **options)
    rows = all_rows(store, getattr(module.drafter.config, "block_layers", LAYERS))
    atol = 1e-5
    for indices in ([0, 1, 2, 3], [5, 4], [7, 8, 9, 10]):
        batch = rows[indices]
        assert (batch.captured is None) == (options.get("target_activations") is False)
        with autocast(torch.device("cpu"), precision):
            expected, found = module.parts(online(batch)), module.parts(batch)
        torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=atol)
        torch.testing.assert_close(found.cross_entropy, expected.cross_entropy, rtol=0, atol=atol)
        torch.testing.assert_close(found.alpha, expected.alpha, rtol=0, atol=100 * atol)


@pytest.mark.parametrize("options", [PROJECTED, EAGLE3], ids=str)
def test_the_target_runs_online_and_never_offline(tmp_path, monkeypatch, options):
    target = TargetModel(tiny_model("llama"))
    rows = all_rows(captured_store(tmp_path / "store", target, "32-true"))
    batch, module = rows[[0, 1]], training_of(target, **options)

    def never(*inputs, **options):
        raise AssertionError("the target's body ran")

    monkeypatch.setattr(target._engine, "run", never)
    module.parts(batch)
    module.begin(rows)
    with pytest.raises(AssertionError, match="body ran"):
        module.parts(online(batch))


class Online:
    """The same rows without what was stored."""

    def __init__(self, rows: FeatureRows) -> None:
        self.rows, self.read = rows, []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: list[int]) -> RowBatch:
        self.read += places
        return online(self.rows[places])


@pytest.mark.parametrize("kind", ["projected", "trained"])
@pytest.mark.parametrize("activations", [True, False])
def test_the_input_is_fitted_to_what_is_stored_as_to_what_the_target_says(tmp_path, monkeypatch, kind, activations):
    monkeypatch.setattr(modules, "FIT_TOKENS", 40)
    target = TargetModel(tiny_model("llama", initializer_range=0.1))
    store = captured_store(tmp_path / "store", target, "32-true")
    module = spire_training(target, input=kind, target_activations=activations, feedback=activations)
    rows, found = all_rows(store, module.drafter.config.block_layers), []
    for one in (rows, Online(rows), rows):
        module.begin(one)
        found.append(module.drafter.embed(torch.arange(VOCAB_SIZE)).detach())
        for parameter in module.drafter.parameters():
            parameter.data.zero_()  # nothing of the fit before may be left
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-2)
    assert torch.equal(found[0], found[2])
    assert found[0].square().mean() > 0.01


class Losses(Callback):
    def __init__(self):
        self.values, self.rows = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item())
        self.rows.append(batch.numbers)


class Signal(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def train(tmp_path, *callbacks, ckpt_path=None, **options):
    """11 rows, 5 batches an epoch. Returns weights, losses and rows of batches, and the target."""
    target = TargetModel(tiny_model("llama", initializer_range=0.1))
    before = fingerprint(target.model, None)
    if not (tmp_path / "store").exists():
        captured_store(tmp_path / "store", target, "32-true")
    data = feature_data(all_rows(open_features(tmp_path / "store")), 2, seed=3, val_rows=2, context_tokens=4)
    module, losses = training_of(target, **options), Losses()
    trainer = quiet_trainer(
        max_steps=13,
        callbacks=[losses, *callbacks],
        logger=False,
        default_root_dir=tmp_path,
        val_check_interval=4,
    )
    if not ckpt_path:
        module.begin(data.train)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    assert fingerprint(target.model, None) == before  # untouched
    weights = {name: p.detach().clone() for name, p in module.drafter.named_parameters()}
    return weights, losses, trainer


@pytest.mark.parametrize(
    ("options", "step"), [({}, 4), (PREVIOUS, 7), (EAGLE3, 7)], ids=["trained", "previous", "eagle3"]
)
def test_interrupted_training_goes_on_bit_for_bit(tmp_path, options, step):
    expected, whole, _ = train(tmp_path, **options)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    with pytest.raises(SystemExit) as stop:
        train(tmp_path, Signal(step), Checkpoints(folder), **options)
    assert stop.value.code == 143
    found, rest, _ = train(tmp_path, ckpt_path=folder.newest(), **options)
    done = folder.newest().name  # the step that was running was finished, and a validation after it
    assert done == f"step-{step + 1:08d}.ckpt"
    assert rest.values == whole.values[step + 1 :]
    assert rest.rows == whole.rows[step + 1 :]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(sum(whole.rows[:5], [])) != list(range(11))  # one row is left over
    assert len(set(sum(whole.rows[:5], []))) == 10


def test_no_thread_is_left_and_the_speed_is_logged(tmp_path):
    before = set(threading.enumerate())  # a run that was interrupted leaves its own until it is collected
    _, _, trainer = train(tmp_path, TokensPerSecond())
    assert trainer.callback_metrics["train/tokens_per_s"] > 0
    assert not [one for one in set(threading.enumerate()) - before if one.name.startswith("read-ahead")]


def test_speed_is_tokens_by_seconds_where_gradients_are_accumulated(monkeypatch):
    """Batches of 100 tokens on two ranks; every second one steps the optimizer and takes 3 s, the others 1 s."""
    now_s, logged = accumulate([1, 3] * 50), {}
    monkeypatch.setattr("time.perf_counter", lambda: next(now_s))
    trainer, batch = SimpleNamespace(world_size=2), SimpleNamespace(n_tokens=100)
    module = SimpleNamespace(log=lambda name, value, **_: logged.update({name: value}))
    speed = TokensPerSecond(peak_tokens_per_s=400)
    for _ in range(99):
        speed.on_train_batch_end(trainer, module, None, batch, 0)
    assert logged["train/tokens_per_s"] == pytest.approx(2 * 100 / 2, rel=0.05)
    assert logged["train/mfu"] == logged["train/tokens_per_s"] / 400
    logged.clear()
    speed.on_validation_end(trainer, module)
    speed.on_train_batch_end(trainer, module, None, batch, 0)
    assert not logged  # no clock runs over a validation, nor over what came before a resumed run


def test_the_loader_counts_what_was_given_not_what_was_read():
    read = []
    loader = SeededLoader(lambda rows: read.append(rows) or rows, 20, 2, seed=1)
    expected = list(SeededLoader(list, 20, 2, seed=1))
    batches = iter(loader)
    given = [next(batches) for _ in range(4)]
    assert loader.state_dict() == {"epoch": 0, "given": 4}
    again = SeededLoader(list, 20, 2, seed=1)
    again.load_state_dict(loader.state_dict())
    assert given + list(again) == expected
    assert len(read) > 4
    batches.close()
    plain = SeededLoader(list, 20, 2, seed=1)
    assert [list(plain) for _ in range(2)][1] == list(again)  # the next epoch
    assert again.state_dict() == {"epoch": 1, "given": 10}


def test_contexts_are_rows_that_validation_does_not_see_unless_these_are_too_few(tmp_path, monkeypatch):
    monkeypatch.setattr("spectrain.training.sources.LEAST_CONTEXTS", 2)
    target = TargetModel(tiny_model("llama"))
    rows = all_rows(captured_store(tmp_path / "store", target, "32-true"))
    for val_rows, context_tokens, expected in ((1, 16, [12, 13]), (2, 8, [11, 12, 13]), (1, 17, [])):
        data = feature_data(rows, 2, 0, val_rows, context_tokens)
        assert data.contexts == [rows.store.tokens(row).tolist() for row in expected]
