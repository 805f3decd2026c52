"""Commands on several real ranks, one after the other in the same processes: imports are paid once.

    torchrun --nproc-per-node 2 -m tests.ranks jobs.json        (`launch`)

A job is `{"command": ..., "arguments": [...], "interrupt": step, "poison": step, "dies": how, "rounds": true}`; without
a command it is `spectrain.train`. Rank zero is interrupted at one step, rank one gets a weight that is NaN at the
other, or dies by one of DEATHS. If `rounds` is false, the target's states are not rounded to bfloat16. A training
leaves in its `run_dir`, for every rank, the rows that it was given (`numbers-<rank>.jsonl`: [step, numbers]) and, at
the end of the fit, the weights put together from all ranks (`whole.safetensors`). What a command said goes to the
terminal, its exit code to `codes.json`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from lightning import Callback
from safetensors.torch import save_file

from spectrain import cli
from spectrain.errors import UserError
from spectrain.training import drafters
from spectrain.training import fit as fitting
from spectrain.training.strategies import whole_state
from tests.conftest import FIT_TOKENS
from tests.support import forks

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
LIMIT_S = 300

DEATHS = {
    "early": UserError("rows=3 must be even; give rows=4"),
    "wrong": UserError("rows=3 must be even; give rows=4"),
    "broken": RuntimeError("shapes differ"),
    "full": torch.OutOfMemoryError("CUDA out of memory"),
    "killed": None,
}


class Watch(Callback):
    """Notes rows and weights; strikes the signal, or spoils a weight of rank one, before the step after a given one."""

    def __init__(self, folder: Path, interrupt: int | None, poison: int | None, dies: str | None) -> None:
        self.folder, self.interrupt, self.poison, self.dies = folder, interrupt, poison, dies
        if dies == "early":  # before ranks have met
            self.die()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.dies and trainer.global_step == 2:
            self.die()
        if trainer.global_rank == 1 and trainer.global_step == self.poison:
            next(module.parameters()).data.fill_(float("nan"))

    def die(self):
        if os.environ["RANK"] == "1":
            Path("dead").touch()
            if DEATHS[self.dies]:
                raise DEATHS[self.dies]
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        with (self.folder / f"numbers-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([trainer.global_step, batch.numbers]) + "\n")

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == self.interrupt and trainer.is_global_zero:
            self.interrupt = None  # once: DeepSpeed calls this for every batch of an accumulated gradient
            os.kill(os.getpid(), signal.SIGINT)

    def on_train_end(self, trainer, module):
        state = whole_state(trainer, module)
        if state is not None:
            state = {name: tensor.clone() for name, tensor in state.items()}
            save_file(state, self.folder / "whole.safetensors")


def run(
    arguments: list[str],
    interrupt: int | None = None,
    poison: int | None = None,
    dies: str | None = None,
    rounds: bool = True,
    command: str = "spectrain.train",
) -> int:
    """One command; its exit code."""
    changed = [(fitting, "callbacks"), (cli, "leave_ranks"), (sys, "argv")]
    changed += [(drafters, "FIT_TOKENS"), (drafters, "STORED_DTYPE")]
    before, callbacks = [getattr(*one) for one in changed], fitting.callbacks
    drafters.FIT_TOKENS = FIT_TOKENS
    drafters.STORED_DTYPE = torch.bfloat16 if rounds else torch.float32
    fitting.callbacks = lambda cfg, run, *more: [Watch(run.path, interrupt, poison, dies), *callbacks(cfg, run, *more)]
    cli.leave_ranks = lambda: None  # DeepSpeed keeps its groups for the life of a process
    sys.argv = [command, *arguments]
    try:
        cli.run(command)
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        for one, value in zip(changed, before, strict=True):
            setattr(*one, value)
    return 0


def torchrun(n_ranks: int, folder: Path, *command: str) -> subprocess.CompletedProcess:
    """Run a module on ranks, in a folder; ranks and torchrun are forks."""
    python = os.environ.get(forks.PYTHON, sys.executable)
    typed = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks), "-m", *command]
    environment = {**os.environ, **ENVIRONMENT, "PYTHON_EXEC": python}
    return subprocess.run(typed, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def launch(n_ranks: int, folder: Path, jobs: list[dict]) -> subprocess.CompletedProcess:
    """Do jobs on ranks, in a folder, and see that each has the exit code that it has as `code`, or by its strikes."""
    expected = [job.pop("code", 130 if "interrupt" in job else 2 if "poison" in job else 0) for job in jobs]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = torchrun(n_ranks, folder, "tests.ranks", "jobs.json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    codes = json.loads((folder / "codes.json").read_text())
    assert codes == expected, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def main() -> None:
    file = Path(sys.argv[1])
    cli.RANK_ZERO_SPEAKS_WITHIN_S = 0.5
    codes = [run(**job) for job in json.loads(file.read_text())]
    if os.environ.get("RANK", "0") == "0":
        file.with_name("codes.json").write_text(json.dumps(codes))
    cli.leave_ranks()
    sys.exit(codes[-1])


if __name__ == "__main__":
    main()
