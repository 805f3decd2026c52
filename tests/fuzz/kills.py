"""Trials of a job: killed at random moments and started again, or started twice in one folder."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.fuzz.compare import differences
from tests.fuzz.fork_server import Outcome, Running, start
from tests.fuzz.jobs import Job

LIMIT_S = 120.0  # of a job of a second or two, on a machine that is busy
MOST_KILLS = 4  # of one run, so that it ends though it may not resume
RIVALS = 0.2  # share of the starts that are to be killed beside which another is started
NEAR_S, FAR_S = 0.05, 3.0  # delays between two starts: half of them are shorter than NEAR_S
IN_USE, DONE = "is in use by", ("is finished", "exists already")  # what refusals may say
REFUSED, OTHER = "refused", "other"


@dataclass(frozen=True)
class Reference:
    """A job, the folder in which it ended undisturbed, and how long it took."""

    job: Job
    folder: Path
    span_s: float

    @classmethod
    def of(cls, job: Job, folder: Path) -> Reference:
        """Run a job in a new folder. Raises RuntimeError where it fails."""
        _make(folder)
        outcome = start(job.typed, folder, ".output").wait(LIMIT_S)
        if outcome.code != 0:
            raise RuntimeError(f"{job.name} ended with {outcome.code}:\n{outcome.output}")
        return cls(job, folder, outcome.elapsed_s)


@dataclass
class Trial:
    """The kills, refusals and faults of one run."""

    job: str
    seed: str
    kills: int = 0
    refused: int = 0  # starts beside another process, or after the end
    faults: list[tuple[str, str]] = field(default_factory=list)  # (kind, what)
    outcomes: list[Outcome] = field(default_factory=list)

    def note(self, outcome: Outcome, beside_another: bool, after_another: bool) -> bool:
        """Note how a start ended that was not killed. Returns whether the job is done."""
        self.outcomes.append(outcome)
        if outcome.code == 0:
            return True
        done = outcome.code == 2 and any(text in outcome.output for text in DONE) and after_another
        used = outcome.code == 2 and IN_USE in outcome.output and beside_another
        if outcome.fault or not (done or used):
            self.faults.append((OTHER, outcome.fault or f"refused: {outcome.output.strip()[-300:]}"))
        else:
            self.refused += 1
        return done


def kill_trial(reference: Reference, folder: Path, seed: str) -> Trial:
    """Kill a job once or a few times, some of them while another process tries the same, until it ends; compare."""
    chance, trial = Random(seed), Trial(reference.job.name, seed)
    _make(folder)
    planned, done = chance.randint(1, MOST_KILLS), False
    while not done and not trial.faults:
        dies = trial.kills < planned
        first, beside_another = _start(trial, reference.job, folder), dies and chance.random() < RIVALS
        running, moment_s = [first], chance.uniform(0, reference.span_s) if dies else LIMIT_S
        if beside_another:
            time.sleep(min(chance.choice([0, NEAR_S, reference.span_s]) * chance.random(), moment_s))
            running.append(_start(trial, reference.job, folder, "-second"))
            chance.shuffle(running)
        victim, *others = running
        outcome = victim.wait(max(0.0, first.started_s + moment_s - time.monotonic()), exact=True)
        if killed := outcome.code is None and dies:
            trial.kills += 1
            trial.outcomes.append(outcome)
        ends = [other.wait(LIMIT_S) for other in others] + ([] if killed else [outcome])
        notes = [trial.note(end, beside_another, trial.kills > 0 or beside_another) for end in ends]
        done = any(notes)
        if done and killed:  # it may have died while it looked at what was done; the next start clears up after it
            trial.note(_start(trial, reference.job, folder, "-after").wait(LIMIT_S), False, True)
        if [end.code for end in ends].count(0) > 1 and not reference.job.repeatable:
            trial.faults.append((OTHER, "two processes did the same work"))
    return _compared(trial, reference, folder)


def start_trial(reference: Reference, folder: Path, seed: str) -> Trial:
    """Start a job twice in one folder, the second a moment later: one works, the other is refused; compare."""
    chance, trial = Random(seed), Trial(reference.job.name, seed)
    _make(folder)
    first = _start(trial, reference.job, folder)
    time.sleep(chance.choice([NEAR_S, FAR_S]) * chance.random())
    both = [first, _start(trial, reference.job, folder, "-second")]
    ends = [running.wait(LIMIT_S) for running in both]
    for end in ends:
        trial.note(end, beside_another=True, after_another=True)
    n_worked = [end.code for end in ends].count(0)
    if n_worked != 1 and not (n_worked == 2 and reference.job.repeatable):
        trial.faults.append((OTHER, f"{n_worked} of 2 processes worked"))
    return _compared(trial, reference, folder)


def _compared(trial: Trial, reference: Reference, folder: Path) -> Trial:
    """Add what differs from the undisturbed run; nothing where the job did not come to its end."""
    if not trial.faults:
        wrong = differences(reference.folder, folder, reference.job.by_the_clock)
        trial.faults += [(difference.kind, difference.what) for difference in wrong]
    return trial


def _start(trial: Trial, job: Job, folder: Path, name: str = "") -> Running:
    return start(job.typed, folder, f".output-{len(trial.outcomes)}{name}")


def _make(folder: Path) -> None:
    """Make a folder anew, for all that the commands leave behind, temporary folders included."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    tempfile.tempdir = str(folder / "tmp")
