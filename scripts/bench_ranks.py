"""Compare two ranks on two cores with one rank on one core: tokens/s of SPIRe training, and whether the losses agree.

    python scripts/bench_ranks.py
    python scripts/bench_ranks.py --repeats 1 --steps 4 --loss-steps 3 --length 128    # a quick trial

Every rank has one thread. Processes take turns (one rank, DDP, ZeRO-2, and again). Each trains on the same global
batches of the bundled target's corpus. Ratios compare two neighbouring processes and are medians with a 95 % bootstrap
interval. Losses are compared in float32, step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from lightning import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.table import Table

from spectrain.cli import expand_shorthands, leave_ranks, open_target, quiet_libraries
from spectrain.measure.statistics import median
from spectrain.stores.locations import conf_dir
from spectrain.training.fit import build_trainer
from spectrain.training.runs import RunFolder
from spectrain.training.spire import SpireTraining

WARM_UP = 2  # steps that are not timed
TRAINERS = {"one rank": "cpu", "DDP": "ddp", "ZeRO-2": "deepspeed_zero2"}


class Watch(Callback):
    """Keeps when steps ended and what their losses were, over all ranks."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: dict, batch: object, batch_idx):
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))
        self.ends_s.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled", help="folder, hub id or bundled name of a Llama-like model")
    parser.add_argument("--batch", type=int, default=4, help="rows of a step, over all ranks")
    parser.add_argument("--length", type=int, default=1024, help="tokens a row")
    parser.add_argument("--steps", type=int, default=12, help=f"steps of a process, the first {WARM_UP} not timed")
    parser.add_argument("--repeats", type=int, default=7, help="processes of each kind")
    parser.add_argument("--loss-steps", type=int, default=50, help="steps whose losses are compared")
    parser.add_argument("--precision", default="32-true", help="of the timed steps")
    parser.add_argument("--worker", nargs=2, metavar=("FILE", "OPTIONS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(Path(args.worker[0]), json.loads(args.worker[1]))
        return
    print(f"{args.target}, batch {args.batch} x {args.length} tokens, one thread a rank, {args.precision}")
    rates = {name: [] for name in TRAINERS}
    for repeat in range(args.repeats):
        for name in TRAINERS:
            ends_s = run(args, name, args.steps, args.precision)["ends_s"][WARM_UP - 1 :]
            rates[name].append(args.batch * args.length / float(np.median(np.diff(ends_s))))
        print(f"repeat {repeat + 1}: " + ", ".join(f"{name} {found[-1]:.0f} tokens/s" for name, found in rates.items()))
    losses = {name: np.array(run(args, name, args.loss_steps, "32-true")["losses"]) for name in TRAINERS}
    show(rates, losses)


def run(args: argparse.Namespace, name: str, steps: int, precision: str) -> dict[str, list[float]]:
    """Trains in processes of its own; what `Watch` saw on rank zero."""
    overrides = [
        *("+exp=spire", f"target={args.target}", f"trainer={TRAINERS[name]}", "trainer.accelerator=cpu"),
        *(f"data.batch_size={args.batch}", f"data.row_tokens={args.length}", "corpus.max_documents=400"),
        *(f"max_steps={steps}", f"trainer.precision={precision}", "trainer.val_check_interval=100000"),
    ]
    launch = [sys.executable]
    if name != "one rank":
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seen.json"
        command = [*launch, __file__, "--worker", str(file), json.dumps(overrides)]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
        return json.loads(file.read_text())


def work(file: Path, overrides: list[str]) -> None:
    """The process of one rank."""
    if "LOCAL_RANK" not in os.environ:  # one rank on one core, whatever it starts beside its thread
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    watch = Watch()
    fit_spire(overrides, [watch])
    if os.environ.get("RANK", "0") == "0":
        file.write_text(json.dumps({"ends_s": watch.ends_s, "losses": watch.losses}))
    leave_ranks()


def fit_spire(overrides: list[str], callbacks: list[Callback]) -> tuple[Trainer, SpireTraining]:
    """Trains as `spectrain.train` does, without its run folder, validation and export."""
    quiet_libraries()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("train", overrides=expand_shorthands(overrides))
    seed_everything(cfg.seed, verbose=False)
    run = RunFolder.find(cfg)
    parts = run.experiment(partial(open_target, cfg, "cpu")).prepare()
    trainer = build_trainer(run.config, cfg.max_steps, callbacks, [])
    trainer.fit(parts.module, datamodule=parts.data)
    return trainer, parts.module


def show(rates: dict[str, list[float]], losses: dict[str, np.ndarray]) -> None:
    one = "one rank"
    steps = len(losses[one])
    table = Table(title="two ranks on two cores against one rank on one core", title_justify="left")
    for column in ("", "tokens/s", "times one rank", f"largest difference of loss, {steps} steps"):
        table.add_column(column, justify="left" if not column else "right")
    for name, found in rates.items():
        ratio = "" if name == one else str(median(np.array(found) / np.array(rates[one])))
        difference = "" if name == one else f"{np.abs(losses[name] - losses[one]).max():.1e}"
        table.add_row(name, f"{np.median(found):.0f}", ratio, difference)
    Console().print(table)


if __name__ == "__main__":
    main()
