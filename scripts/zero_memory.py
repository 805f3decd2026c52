"""Measure what a rank of ZeRO-2 and ZeRO-3 holds, tensor by tensor, for a SPIRe drafter on two ranks.

    python scripts/zero_memory.py
    python scripts/zero_memory.py --precision 32-true --length 128    # a quick trial

The bytes are compared with arithmetic. Of P parameters on N ranks, a rank holds these bytes in bfloat16 (in float32 the
first two rows have 4 bytes per number):

    parameters        2 P        under ZeRO-3  2 P / N, and 2 bytes of each small one that stays whole
    gradients         2 P / N
    optimizer state  12 P / N    float32 weights, first and second moments

Bytes are counted on live tensors, and gradients between backward and optimizer step. Buffers of collectives are not
counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from bench_ranks import fit_spire
from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from spectrain.cli import leave_ranks

RANKS = 2
STAGES = {"ZeRO-2": "deepspeed_zero2", "ZeRO-3": "deepspeed_zero3"}


class Count(Callback):
    """Counts bytes in the second step, when all of the optimizer's state exists."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: torch.optim.Optimizer):
        if trainer.global_step != 1:
            return
        zero = trainer.strategy.optimizers[0]
        parameters = list(module.parameters())
        pieces = hasattr(parameters[0], "ds_tensor")
        master = zero.fp32_partitioned_groups_flat if pieces else zero.single_partition_of_fp32_groups
        moments = [t for state in zero.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        whole = [p.grad for p in parameters if p.grad is not None]
        kept = [p for p in parameters if pieces and p.ds_persist]
        self.found = {
            "n_parameters": sum(p.ds_numel if pieces else p.numel() for p in parameters),
            "n_kept": sum(p.ds_numel for p in kept),
            "parameters": n_bytes(p.ds_tensor for p in parameters) if pieces else n_bytes(parameters),
            "kept whole": n_bytes(kept),
            "gradients": n_bytes([*zero.averaged_gradients.values(), *whole]),
            "optimizer state": n_bytes(master) + n_bytes(moments),
        }


def n_bytes(tensors: Iterable[Tensor | Iterable[Tensor]]) -> int:
    """Of tensors, or of lists of them, each memory counted once."""
    seen: dict[int, int] = {}
    for t in tensors:
        for one in [t] if torch.is_tensor(t) else t:
            seen[one.data_ptr()] = one.numel() * one.element_size()
    return sum(seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled", help="folder, hub id or bundled name of a Llama-like model")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--precision", default="bf16-mixed", help="bf16-mixed or 32-true")
    parser.add_argument("--worker", nargs=2, metavar=("FOLDER", "OPTIONS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        count = Count()
        fit_spire(json.loads(args.worker[1]), [count])
        Path(args.worker[0], f"{os.environ['RANK']}.json").write_text(json.dumps(count.found))
        leave_ranks()
        return
    table = Table(title=f"bytes of a rank, {RANKS} ranks, {args.precision}", title_justify="left")
    for column in ("", "what", "measured, each rank", "expected", "measured / expected"):
        table.add_column(column, justify="left" if column in ("", "what") else "right")
    for name in STAGES:
        add_rows(table, name, run(args, name), 2 if args.precision.startswith("bf16") else 4)
    Console().print(table)


def run(args: argparse.Namespace, name: str) -> list[dict[str, int]]:
    """What each rank counted."""
    overrides = [
        *("+exp=spire", f"target={args.target}", f"trainer={STAGES[name]}", "trainer.accelerator=cpu"),
        *(f"data.batch_size={RANKS}", f"data.row_tokens={args.length}", "corpus.max_documents=100"),
        *("max_steps=2", f"trainer.precision={args.precision}", "trainer.val_check_interval=100000"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = [*launch, __file__, "--worker", folder, json.dumps(overrides)]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


def add_rows(table: Table, name: str, ranks: list[dict[str, int]], width: int) -> None:
    """`width`: bytes of a number that the forward reads."""
    n, kept = ranks[0]["n_parameters"], ranks[0]["n_kept"]
    expected = {
        "parameters": width * n / (RANKS if name == "ZeRO-3" else 1),
        "kept whole": width * kept,
        "gradients": width * n / RANKS,
        "optimizer state": 12 * n / RANKS,
    }
    for what, share in expected.items():
        if not share:
            continue
        measured = [rank[what] for rank in ranks]
        ratio = sum(measured) / len(measured) / share
        table.add_row(name, what, " ".join(f"{m:,}" for m in measured), f"{share:,.0f}", f"{ratio:.3f}")
        name = ""
    table.add_section()


if __name__ == "__main__":
    main()
