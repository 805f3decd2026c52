"""Kill a command at random moments, start it again, and compare what it made with an uninterrupted run.

    python scripts/kill_runs.py --kills 20 -- python -m spectrain.train +exp=spire checkpoint_s=5 max_steps=120
    python scripts/kill_runs.py --kills 20 -- python -m data_prep.activations

The command is run in two empty folders, so give absolute paths in it. In the first folder it runs to its end. In the
second it is killed (kill -9, with all its ranks) after a random share of that time and started again, until it ends.
Then the folder is compared and emptied, and this is repeated until the given number of kills is reached. The sha256 of
all tensors and stores and the curve of a training are compared bit for bit. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from spectrain.stores.folder import MANIFEST, sha256
from spectrain.training.checkpoints import step_of
from spectrain.training.runs import Curve, RunFolder

COMPARED = (".safetensors", ".arrow", ".npy", ".bin", ".png")  # what a command makes; not logs, notes and clocks
BY_THE_CLOCK = ("train/tokens_per_s", "train/wait_share")  # metrics that differ between equal runs


@dataclass(frozen=True)
class Kill:
    """What a kill found."""

    after_s: float  # since the start of the command
    reached: str  # the last step logged, or files made
    resumes: str  # where the next start goes on


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--least-s", type=float, default=0.2, help="seconds before a kill; imports alone take several")
    parser.add_argument("--work", type=Path, default=Path("runs/kills"), help="folder; an earlier one is emptied")
    parser.add_argument("command", nargs="+", help="behind --")
    args = parser.parse_args()
    whole, killed = (args.work.resolve() / name for name in ("whole", "killed"))
    for folder in (whole, killed):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    start_s = time.monotonic()
    run_through(args.command, whole)
    span_s = time.monotonic() - start_s
    print(f"uninterrupted: {span_s:.1f} s", flush=True)

    moments, kills, n_runs, wrong, after_kill = random.Random(args.seed), [], 0, [], False
    while len(kills) < args.kills:
        kill = kill_once(args.command, killed, moments.uniform(args.least_s, span_s), after_kill)
        after_kill = kill is not None
        if kill:
            kills.append(kill)
            print(f"kill {len(kills)} after {kill.after_s:.1f} s: {kill.reached}, {kill.resumes}", flush=True)
            if len(kills) < args.kills:
                continue
            run_through(args.command, killed, after_kill)
        n_runs += 1
        wrong += differences(whole, killed)
        if len(kills) < args.kills:  # it ended before it was killed as often: once more from nothing
            shutil.rmtree(killed)
            killed.mkdir()
    Console().print(table(kills))
    print(f"{len(kills)} kills in {n_runs} runs;", "; ".join(wrong) or "all equal to the uninterrupted one")
    return int(bool(wrong))


def run_through(command: Sequence[str], folder: Path, after_kill: bool = False) -> None:
    """Runs a command to its end; its log is kept in `log.txt`."""
    with (folder / "log.txt").open("a") as log:
        check(subprocess.run(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT).returncode, folder, after_kill)


def kill_once(command: Sequence[str], folder: Path, after_s: float, after_kill: bool = False) -> Kill | None:
    """Starts the command and kills it with all its children; None where it ended by itself before."""
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            check(process.wait(after_s), folder, after_kill)
            return None
        except subprocess.TimeoutExpired:
            kill_all(psutil.Process(process.pid))
            process.wait()
            return Kill(after_s, *state(folder))


def kill_all(process: psutil.Process) -> None:
    """kill -9 of a process and all below it: torchrun's ranks are in sessions of their own."""
    alive = [process, *process.children(recursive=True)]
    for each in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(alive[1:])


def check(code: int, folder: Path, after_kill: bool) -> None:
    """Ends the script where the command failed; 2 after a kill says that it had come to its end just before."""
    if code and not (code == 2 and after_kill):
        sys.exit(f"the command ended with {code}:\n{(folder / 'log.txt').read_text()[-2000:]}")


def state(folder: Path) -> tuple[str, str]:
    """How far a command had come, and where it will go on."""
    for run in runs_in(folder):
        curve = run.curve()
        newest = run.checkpoints.newest()
        done = max((step for step, row in curve.items() if "train/loss" in row), default=-1) + 1
        return f"step {done}", f"resumes from {step_of(newest) if newest else 0}"
    n_files = sum(file.is_file() for file in folder.rglob("*")) - 1
    return f"{n_files} files", ""


def runs_in(folder: Path) -> list[RunFolder]:
    """All trainings below a folder."""
    found = []
    for file in sorted(folder.rglob("run.json")):
        found.append(RunFolder(file.parent, {}, json.loads(file.read_text())["id"]))
    return found


def differences(whole: Path, killed: Path) -> list[str]:
    """What differs between two folders in which the same command ended."""
    found = []
    expected, made = (digests(folder) for folder in (whole, killed))
    for name in sorted(expected.keys() | made.keys()):
        if expected.get(name) != made.get(name):
            found.append(f"{name} differs" if name in expected and name in made else f"{name} is in one only")
    for one, other in zip(runs_in(whole), runs_in(killed), strict=False):
        curves = [without_clock(run.curve()) for run in (one, other)]
        steps = [s for s in curves[0].keys() | curves[1].keys() if curves[0].get(s) != curves[1].get(s)]
        found += [f"the curve of {one.name} differs at steps {sorted(steps)[:5]}"] if steps else []
    if len(runs_in(whole)) != len(runs_in(killed)):
        found.append("other runs were made")
    partial = [str(file.relative_to(killed)) for file in killed.rglob(".*") if not is_known_hidden(file)]
    return found + [f"{name} was left behind" for name in partial]


def without_clock(curve: Curve) -> Curve:
    """The curve without what depends on the machine's speed: equal runs have equal ones."""
    return {step: {name: v for name, v in row.items() if name not in BY_THE_CLOCK} for step, row in curve.items()}


def digests(folder: Path) -> dict[str, str]:
    """sha256 by name, of tensors and of what manifests list; not of checkpoints, which hold clocks."""
    files = {file for file in folder.rglob("*") if file.suffix in COMPARED and file.is_file()}
    for manifest in folder.rglob(MANIFEST):
        files |= {manifest.parent / name for name in json.loads(manifest.read_text()).get("files", {})}
    return {str(file.relative_to(folder)): sha256(file) for file in files}


def is_known_hidden(file: Path) -> bool:
    return file.name == ".gitignore" or "wandb" in file.parts


def table(kills: Sequence[Kill]) -> Table:
    shown = Table(title="kills", title_justify="left")
    for name in ("kill", "after s", "reached", ""):
        shown.add_column(name, justify="right" if name in ("kill", "after s") else "left")
    for i, kill in enumerate(kills):
        shown.add_row(str(i + 1), f"{kill.after_s:.1f}", kill.reached, kill.resumes)
    return shown


if __name__ == "__main__":
    sys.exit(main())
