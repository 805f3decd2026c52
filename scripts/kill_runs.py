"""Kill commands at random moments, start them again, and compare what they made with an undisturbed run.

    python scripts/kill_runs.py kills=1000 [of=bench,acceptance] [jobs=2] [seed=0] [work=runs/kills]
    python scripts/kill_runs.py starts=200      # the same job twice in one folder, the second 0 to 3 s later
    python scripts/kill_runs.py kills=20 -- python -m spectrain.train +exp=spire checkpoint_s=5 max_steps=120

The first two run small jobs of all commands that write a folder, in forks of one process, `jobs` at the same time.
A run is killed (kill -9) a few times, now and then while a second process tries the same, and started again until it
ends. Of two that start together one must work and the other be refused in one sentence. Then rows, tensors, stores,
curves and results must equal the undisturbed run's, and nothing else may be there. The table counts what is wrong;
<work>/faults.jsonl has each fault with its seed and what was printed, and its folder stays in <work>.
Leave the checkout as it is meanwhile: each start reads conf/ anew.

The third takes any command, with all its ranks. It is run in two empty folders, so give absolute paths in it. The exit
code is 1 if anything differs.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from multiprocessing import get_context
from pathlib import Path
from typing import TextIO

import pandas as pd
import psutil
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzz import fork_server, world
from tests.fuzz.compare import KINDS, differences, runs_in
from tests.fuzz.jobs import jobs
from tests.fuzz.kills import OTHER, REFUSED, Reference, Trial, kill_trial, start_trial

from spectrain.training.checkpoints import step_of

DEFAULTS = {"kills": None, "starts": None, "of": None, "jobs": 1, "seed": 0, "work": "runs/kills", "least_s": 0.2}
PRINTED_CHARACTERS = 2000  # of each start of a run with a fault


def main() -> int:
    typed = sys.argv[1:]
    behind = typed.index("--") if "--" in typed else len(typed)
    options = OmegaConf.merge(DEFAULTS, OmegaConf.from_cli(typed[:behind]))
    if typed[behind + 1 :]:
        return kill_any(options, typed[behind + 1 :])
    if not options.kills and not options.starts:
        sys.exit("error: nothing to do; give kills=<number>, starts=<number>, or both")
    return kill_jobs(options)


def kill_jobs(options: DictConfig) -> int:
    """Try the jobs of the tiny world in turn until there were as many kills and starts as asked for."""
    work = Path(options.work).resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    fork_server.load_commands()
    known = jobs(world.build(work / "world"))
    asked = str(options.of or "").replace(",", " ").split()
    chosen = [job for job in known if not asked or set(job.name.replace(",", "").split()) & set(asked)]
    references = [Reference.of(job, work / "undisturbed" / str(i)) for i, job in enumerate(chosen)]
    n_faults = 0
    with (work / "faults.jsonl").open("w") as faults:
        for name, trial in (("kills", kill_trial), ("starts", start_trial)):
            if options[name]:
                table = table_of_trials(trials(trial, options[name], references, options, work), faults)
                print(f"{name}\n{table.to_string()}\n", flush=True)
                n_faults += int(table.loc["all", [*KINDS, OTHER]].sum())
    print(f"{n_faults} faults: {work / 'faults.jsonl'}")
    return int(n_faults > 0)


def trials(
    trial: Callable[..., Trial], n_left: int, references: Sequence[Reference], options: DictConfig, work: Path
) -> Iterator[tuple[Trial, Path]]:
    """Yield trials and their folders as they end, a few at the same time, until there were as many kills or starts."""
    new, running = zip(cycle(references), count(), strict=False), {}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
        while n_left > 0 or running:
            while n_left > 0 and len(running) < options.jobs:
                reference, number = next(new)
                folder = work / f"{trial.__name__}-{number}"
                running[pool.submit(trial, reference, folder, f"{options.seed}-{number}")] = folder
                n_left -= trial is start_trial
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                n_left -= ended.result().kills
                yield ended.result(), running.pop(ended)


def table_of_trials(done: Iterator[tuple[Trial, Path]], faults: TextIO) -> pd.DataFrame:
    """Count by job what is wrong, write each fault down, and keep the folders of those only."""
    counts: dict[str, Counter[str]] = {}
    for trial, folder in done:
        mine = counts.setdefault(trial.job, Counter())
        mine.update(["runs"], kills=trial.kills, **{REFUSED: trial.refused})
        mine.update(kind for kind, _ in trial.faults)
        if not trial.faults:
            shutil.rmtree(folder)
            continue
        printed = [[outcome.code, outcome.output[-PRINTED_CHARACTERS:]] for outcome in trial.outcomes]
        row = {"job": trial.job, "seed": trial.seed, "faults": trial.faults, "folder": str(folder), "printed": printed}
        faults.write(json.dumps(row) + "\n")
        faults.flush()
    table = pd.DataFrame(counts).T.reindex(columns=["runs", "kills", REFUSED, *KINDS, OTHER]).fillna(0).astype(int)
    table.loc["all"] = table.sum()
    return table


@dataclass(frozen=True)
class Kill:
    """What a kill found."""

    after_s: float  # since the start of the command
    reached: str  # the last step logged, or files made
    resumes: str  # where the next start goes on


def kill_any(options: DictConfig, command: Sequence[str]) -> int:
    """Kill a command, whatever it is, until there were as many kills as asked for."""
    whole, killed = (Path(options.work).resolve() / name for name in ("whole", "killed"))
    for folder in (whole, killed):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    start_s = time.monotonic()
    run_through(command, whole)
    span_s = time.monotonic() - start_s
    print(f"uninterrupted: {span_s:.1f} s", flush=True)

    moment, kills, n_runs, wrong, after_kill = random.Random(options.seed).uniform, [], 0, [], False
    moment = partial(moment, options.least_s, span_s)
    while len(kills) < options.kills:
        kill = kill_once(command, killed, moment(), after_kill)
        after_kill = kill is not None
        if kill:
            kills.append(kill)
            print(f"kill {len(kills)} after {kill.after_s:.1f} s: {kill.reached}, {kill.resumes}", flush=True)
            if len(kills) < options.kills:
                continue
            run_through(command, killed, after_kill)
        n_runs += 1
        wrong += [difference.what for difference in differences(whole, killed)]
        if len(kills) < options.kills:  # it ended before it was killed as often: once more from nothing
            shutil.rmtree(killed)
            killed.mkdir()
    Console().print(table_of(kills))
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


def table_of(kills: Sequence[Kill]) -> Table:
    shown = Table(title="kills", title_justify="left")
    for name in ("kill", "after s", "reached", ""):
        shown.add_column(name, justify="right" if name in ("kill", "after s") else "left")
    for i, kill in enumerate(kills):
        shown.add_row(str(i + 1), f"{kill.after_s:.1f}", kill.reached, kill.resumes)
    return shown


if __name__ == "__main__":
    sys.exit(main())
