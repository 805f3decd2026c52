"""What capturing activations costs, and what training from them saves.

    python scripts/bench_activations.py --target checkpoints/pystdlib-8l
    python scripts/bench_activations.py --target <folder or hub id> --dtype bfloat16 --batch 8 --out /fast/disk

Capture: shards computed, copied, written, hashed and synced to disk, as `data_prep.activations` does it, against the
plain forward of the target's body over the same batches. Training: a SPIRe step with the target beside it against one
from the store that was just written, read ahead by the loader. Both take turns; a ratio is of two neighbours, given as
the median with a 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from rich.console import Console
from rich.table import Table

from data_prep.capture import AUTOCAST, ShardParts, TokenRows, autocast, shard_facts
from data_prep.pipeline import Build
from data_prep.ranks import launch
from spectrain.decoding import TargetModel, load_target
from spectrain.decoding.lean import shape_of
from spectrain.decoding.masks import length_buckets
from spectrain.measure.statistics import Estimate, median
from spectrain.models.pruned_init import last_layers, new_drafter
from spectrain.models.spire import SpireConfig
from spectrain.stores.features import FeatureStore, open_features
from spectrain.stores.folder import write_manifest
from spectrain.stores.locations import bundled_folder
from spectrain.training.data import FeatureRows, RowBatch, SeededLoader
from spectrain.training.losses import LossSettings
from spectrain.training.optim import OptimizerSettings
from spectrain.training.spire import SpireTraining

WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pystdlib-8l", help="folder, hub id or bundled name of a Llama-like model")
    parser.add_argument("--dtype", default="float32", help="of the target's weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="bf16-mixed", choices=list(AUTOCAST))
    parser.add_argument("--store-dtype", default="bfloat16", choices=["bfloat16", "int8"])
    parser.add_argument("--batch", type=int, default=4, help="rows of a training step")
    parser.add_argument("--length", type=int, default=1024, help="tokens a row")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="of a capturing forward")
    parser.add_argument("--shard-tokens", type=int, default=16384)
    parser.add_argument("--shards", type=int, default=2, help="of a timed capture")
    parser.add_argument("--pairs", type=int, default=7, help="timed pairs, of captures and of training steps")
    parser.add_argument("--out", type=Path, default=None, help="folder on the disk to write to; None: a temporary one")
    args = parser.parse_args()
    target = load_target(bundled_folder(args.target) or args.target, args.dtype, args.device)
    config = SpireConfig(shape_of(target.model), last_layers(target.model, 2))
    target = target.with_capture(config.captured_layers)
    table = Table(title=f"{args.target}, {args.precision}, {torch.get_num_threads()} threads, {target.device}")
    for head in ("", "median", "95 % interval"):
        table.add_column(head, no_wrap=True)
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        store = report_capture(args, target, Path(folder), table)
        table.add_section()
        report_training(args, target, config, store, table)
    Console(width=110).print(table)


def report_capture(args: argparse.Namespace, target: TargetModel, folder: Path, table: Table) -> FeatureStore:
    """Times captures against plain forwards; returns the last store."""
    rows = random_rows(args, target)
    seconds: dict[str, list[float]] = {"plain": [], "capture": []}
    for pair in range(args.pairs + 1):
        for name, run in {"plain": plain_forwards, "capture": partial(captures, folder=folder)}.items():
            elapsed_s = timed(target, run, args, target, rows)
            if pair:  # the first is the warm-up
                seconds[name].append(elapsed_s)
    plain, capture = (np.array(seconds[name]) for name in ("plain", "capture"))
    n_tokens, width = len(rows.tokens), target.unembedding.shape[-1]
    add(table, "plain forward of the body, tokens/s", median(n_tokens / plain), "{:,.0f}")
    add(table, "capture, tokens/s", median(n_tokens / capture), "{:,.0f}")
    add(table, "capture / plain forward", median(plain / capture), "{:.3f}")
    n_bytes = sum(facts["bytes"] for facts in shard_facts(build_in(folder), args.shards).values()) / n_tokens
    table.add_row("bytes a token", f"{n_bytes:,.1f}", f"{n_bytes / (3 * width * 2) - 1:+.2%} against 3 * D * 2")
    return as_store(args, target, rows, folder)


def random_rows(args: argparse.Namespace, target: TargetModel) -> TokenRows:
    n_rows = args.shards * (args.shard_tokens // args.length)
    tokens = np.random.default_rng(0).integers(0, target.vocab_size, size=(n_rows, args.length), dtype=np.int32)
    return TokenRows.of_texts([(row, 0, False) for row in tokens])


@torch.inference_mode()
def plain_forwards(args: argparse.Namespace, target: TargetModel, rows: TokenRows) -> None:
    """The body over the batches that a capture takes, and nothing else."""
    per_shard = args.shard_tokens // args.length
    tokens = torch.from_numpy(rows.tokens).view(-1, args.length)
    for start in range(0, len(rows), per_shard):
        for batch in length_buckets([args.length] * per_shard, args.batch_tokens):
            inputs = tokens[[start + row for row in batch]].long().to(target.device)
            with autocast(target.device, args.precision):
                target.features(inputs)


def captures(args: argparse.Namespace, target: TargetModel, rows: TokenRows, folder: Path) -> None:
    build = build_in(folder)
    build.work.mkdir(exist_ok=True)
    parts_of(args, target, rows).make(build, range(args.shards), advance=lambda n_tokens: None)


def build_in(folder: Path) -> Build:
    return Build(launch("cpu", "none"), "activations", folder / "store", {})


def parts_of(args: argparse.Namespace, target: TargetModel, rows: TokenRows) -> ShardParts:
    facts = {"target": args.target, "config": {}, "source": {}}
    options = (args.precision, args.store_dtype, args.batch_tokens, args.shard_tokens)
    return ShardParts(rows, target, *options, facts)


def as_store(args: argparse.Namespace, target: TargetModel, rows: TokenRows, folder: Path) -> FeatureStore:
    """What the last capture left, as a store."""
    store = build_in(folder).store
    write_manifest(store, parts_of(args, target, rows).manifest, shard_facts(build_in(folder), args.shards))
    return open_features(store)


@dataclass
class Step:
    """One kind of training, its own drafter and optimizer."""

    module: SpireTraining
    optimizer: torch.optim.Optimizer
    precision: str

    def __call__(self, batch: RowBatch) -> None:
        device = self.module.target.device
        batch = move_data_to_device(batch, device)
        with autocast(device, self.precision):
            loss = self.module.parts(batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def new_step(args: argparse.Namespace, target: TargetModel, config: SpireConfig) -> Step:
    drafter = new_drafter(target, config, "pruned").to(target.device)
    module = SpireTraining(drafter, target, LossSettings(), OptimizerSettings()).to(target.device)
    return Step(module, torch.optim.AdamW(drafter.parameters(), lr=1e-4), args.precision)


def report_training(
    args: argparse.Namespace, target: TargetModel, config: SpireConfig, store: FeatureStore, table: Table
) -> None:
    rows = FeatureRows(
        store, np.arange(len(store)), config.captured_layers, args.length, pinned=target.device.type == "cuda"
    )
    loader = SeededLoader(rows.__getitem__, len(rows), args.batch, seed=0)
    batches = endless(loader)
    online, offline = (new_step(args, target, config) for _ in range(2))
    seconds: dict[str, list[float]] = {"body": [], "online": [], "offline": [], "waited": []}
    for pair in range(args.pairs + WARM_UP):
        waited_s, start_s = loader.waited_s, time.perf_counter()
        batch = next(batches)
        read_s = time.perf_counter() - start_s
        alone = replace(batch, captured=None, final_hidden=None)
        found = {
            "body": timed(target, body, args, target, alone),
            "online": timed(target, online, alone),
            "offline": read_s + timed(target, offline, batch),
            "waited": loader.waited_s - waited_s,
        }
        for name, elapsed_s in found.items() if pair >= WARM_UP else ():
            seconds[name].append(elapsed_s)
    times = {name: np.array(values) for name, values in seconds.items()}
    add(table, "target's body in a step, s", median(times["body"]), "{:.4f}")
    add(table, "online step, s", median(times["online"]), "{:.4f}")
    add(table, "offline step, s", median(times["offline"]), "{:.4f}")
    add(table, "body's time that offline saves", median((times["online"] - times["offline"]) / times["body"]), "{:.1%}")
    add(table, "share of waiting, beside online steps", median(times["waited"] / times["offline"]), "{:.2%}")
    report_offline_alone(args, offline, rows, table, target)


def report_offline_alone(
    args: argparse.Namespace, offline: Step, rows: FeatureRows, table: Table, target: TargetModel
) -> None:
    """Offline steps without online ones between them, in which the loader could rest."""
    loader = SeededLoader(rows.__getitem__, len(rows), args.batch, seed=1)
    batches = endless(loader)
    shares = []
    for step in range(args.pairs + WARM_UP):
        waited_s = loader.waited_s
        elapsed_s = timed(target, lambda: offline(next(batches)))
        if step >= WARM_UP:
            shares.append((loader.waited_s - waited_s) / elapsed_s)
    add(table, "share of waiting, offline steps alone", median(shares), "{:.2%}")


@torch.no_grad()
def body(args: argparse.Namespace, target: TargetModel, batch: RowBatch) -> None:
    with autocast(target.device, args.precision):
        target.features(batch.tokens.to(target.device))


def endless(loader: SeededLoader) -> Iterator[RowBatch]:
    while True:
        yield from loader


def timed(target: TargetModel, run: Callable, *arguments: object) -> float:
    """Seconds of a call, the work of the target's device included."""
    start_s = time.perf_counter()
    run(*arguments)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter() - start_s


def add(table: Table, name: str, value: Estimate, form: str) -> None:
    table.add_row(name, form.format(value.value), f"{form.format(value.low)} .. {form.format(value.high)}")


if __name__ == "__main__":
    main()
