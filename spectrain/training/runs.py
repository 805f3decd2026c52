"""Run folders: one per resolved config, so that the same command finds its own interrupted run.

runs/spire-1f0c93ab/
    config.yaml        the resolved config
    run.json           the run's id, the command as it was typed, and for each attempt when, where and with which code
                       it ran
    source.json        the target's fingerprint, and the stored rows and drafter that a training began with
    trained_on.npz     a sample of the text, by which a benchmark sees that it holds its questions
    checkpoints/       of the latest step, written every few minutes and at an interruption; best/: what is exported
    metrics/version_0/metrics.csv   every logged number, one folder per attempt
    export.json        where the run is exported to
    result.json        written last: the run is finished
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf
from torch import Tensor

from spectrain.config import TYPED_COMMAND, read_yaml, training_of
from spectrain.config.fields import plain
from spectrain.config.training import Train
from spectrain.errors import FinishedRun, UserError
from spectrain.stores.files import read_json, strict, write_json
from spectrain.stores.folder import digest, locked, refuse_existing, remove_leftovers, write_folder
from spectrain.stores.locations import CHECKPOINTS
from spectrain.training.checkpoints import BestFolder, CheckpointFolder, step_of, whole_weights

Curve = dict[int, dict[str, float]]  # step -> metric -> value
CONFIG, FACTS, SOURCE, EXPORT = "config.yaml", "run.json", "source.json", "export.json"
# They do not change what is trained.
NOT_HASHED = ("run_dir", "fresh", "plan", "hardware", "logger", "out", "tau", "vanilla", "checkpoint_s", "export_dtype")
NOT_HASHED += ("minutes", "json")  # of a benchmark
# A run may go on with another number of ranks, or another server of the same target.
NOT_HASHED_OF = {
    "trainer": ("devices", "num_nodes", "log_every_n_steps", "activation_checkpointing", "compile"),
    "target": ("device", "parallel", "tp"),
    "data": ("address", "timeout_s"),
}
# An option of earlier versions, at the value that it had: runs are still named as if it were there.
EARLIER = {"workload": {"batch": [1, 8], "context_tokens": [1024, 8192]}}
# Options that came later, with the values by which runs of earlier versions were made: at them they are not hashed.
LATER = {
    **{"shifted_blocks": True, "own_key": True, "max_length": None, "epochs": None},
    "optimizer": {"final_share": 0.0},
}


@dataclass(frozen=True)
class RunFolder:
    """A run that may begin: a new one, or an interrupted one that is resumed."""

    path: Path
    config: Any  # resolved: a `Train`, or plain values of a measurement
    id: str  # a name that no other run has, kept when the run is resumed
    result: str = "result.json"  # written last: the run is finished
    asked: Train | None = None  # the config as it was asked, by which the run is named; None: as it is
    resumes: bool = False

    @classmethod
    @contextmanager
    def claim(
        cls, config: Train | dict, result: str = "result.json", settle: Callable[[Train], Train] | None = None
    ) -> Iterator[RunFolder]:
        """Keep other processes out of the folder of this config, on rank zero, and find the run that may begin there.

        `config` has `kind`, `run_dir` (None: named by the hash), `fresh`, and what is run. `settle` returns it with
        values for what it leaves to the machine. A run is named by what was asked, and what its first start has settled
        stays as it is when it goes on elsewhere.

        Raises UserError where another process is at work there, and as `find` does.
        """
        path = cls.path_of(config)
        with locked(path) if rank_zero_only.rank == 0 else nullcontext():
            run = cls.find(config, result)
            yield run if settle is None else run._settled(settle)

    @staticmethod
    def path_of(config: Train | dict) -> Path:
        """Return the folder that is given, or that is named by the hash of the config."""
        values = plain(config)
        return Path(values["run_dir"] or f"runs/{values['kind']}-{digest(hashed(values))}")

    @classmethod
    def find(cls, config: Train | dict, result: str = "result.json") -> RunFolder:
        """Return the run of this config. Writes nothing.

        An unfinished run of this very config is resumed, `fresh` or not; `fresh` replaces a finished or another one.
        Otherwise these are refused by a UserError, as is a folder that holds something else.
        """
        path, fresh, is_rank_zero = cls.path_of(config), plain(config)["fresh"], rank_zero_only.rank == 0
        new_id = run_of_agent() or f"{plain_name(path.name)}-{uuid.uuid4().hex[:8]}"
        run = cls(path, config, new_id, result)
        if not (path / CONFIG).is_file():
            if is_rank_zero and path.exists() and any(path.iterdir()):
                raise UserError(f"run_dir={path} is not empty and holds no run; give another run_dir")
            return run
        if fresh and not is_rank_zero:  # rank zero may be replacing what stands here
            return run
        if reason := run._why_not_to_resume():
            if fresh or not (is_rank_zero or isinstance(reason, FinishedRun)):
                return run
            raise reason
        run = dataclasses.replace(run, resumes=True)
        return dataclasses.replace(run, id=run.facts()["id"]) if is_rank_zero else run

    def _settled(self, settle: Callable[[Train], Train]) -> RunFolder:
        """Return the run with values for what its config leaves open: those of its first start, else by `settle`."""
        config = settle(self.config)
        if self.resumes:  # what is not hashed, and where it runs, may be another now
            kept, values = read_yaml(self.path / CONFIG), plain(config)
            begun = hashed(kept)
            if self.config.tau.context_tokens is None:  # they follow the length of the rows
                values["tau"]["context_tokens"] = kept["tau"]["context_tokens"]
            begun |= {name: values[name] | begun[name] for name in NOT_HASHED_OF}
            begun["trainer"]["accelerator"] = config.trainer.accelerator
            config = training_of(values | begun, checks=False)
        return dataclasses.replace(self, config=config, asked=self.config)

    def change(self, options: Mapping[str, object]) -> None:
        """Change options by dotted name to what the run's data has decided."""
        for name, value in options.items():
            group, _, option = name.rpartition(".")
            setattr(attrgetter(group)(self.config), option, value)
        if options and rank_zero_only.rank == 0 and self.facts().get("id") == self.id:  # it has begun
            OmegaConf.save(OmegaConf.create(plain(self.config)), self.path / CONFIG)

    def _why_not_to_resume(self) -> UserError | None:
        before, ours = hashed(self.facts().get("asked") or read_yaml(self.path / CONFIG)), hashed(plain(self.config))
        differing = sorted(key for key in before.keys() | ours.keys() if before.get(key) != ours.get(key))
        if differing:
            return UserError(
                f"run_dir={self.path} holds a run of another config (differs in {', '.join(differing)}); "
                "give another run_dir or fresh=true"
            )
        if (self.path / self.result).is_file():
            return FinishedRun(
                f"this run is finished ({self.path}); change an option, or repeat it from the start with fresh=true"
            )
        return None

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return a run as it stands, finished or not. Raises UserError where the folder is none."""
        if not (path / CONFIG).is_file() or not (path / FACTS).is_file():
            raise UserError(
                f"run={path} is no run of spectrain train (it has no {CONFIG}); give its folder below runs/"
            )
        return cls(path, training_of(read_yaml(path / CONFIG), checks=False), id=read_json(path / FACTS)["id"])

    @rank_zero_only
    def begin(self) -> None:
        """Make the folder and keep the config, in place of an earlier run that stands there; or resume its own run."""
        if self.facts().get("id") == self.id:
            remove_leftovers(self.path)
            return
        asked = self.asked and plain(self.asked)
        facts = {"id": self.id, "command": TYPED_COMMAND.get(), "asked": asked, "attempts": []}

        def write(folder: Path) -> None:
            OmegaConf.save(OmegaConf.create(plain(self.config)), folder / CONFIG)
            write_json(folder / FACTS, facts)
            if (self.path / EXPORT).is_file():  # this run replaces the one that stood here, and its export too
                shutil.copy(self.path / EXPORT, folder)

        write_folder(self.path, write, replace=True)

    @rank_zero_only
    def note_steps(self, steps: int) -> None:
        """Add to run.json how many steps the run has."""
        write_json(self.path / FACTS, self.facts() | {"steps": steps})

    @rank_zero_only
    def note_attempt(self, done_steps: int, environment: dict) -> None:
        """Add to run.json that the command was started once more, after `done_steps` steps of earlier attempts.

        `environment` holds `code`, the commit, and `environment`, the versions, host, devices and ranks.
        """
        facts, started = self.facts(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        facts["attempts"].append({"started": started, "done_steps": done_steps, **environment})
        write_json(self.path / FACTS, facts)

    @rank_zero_only
    def keep_to(self, source: dict) -> None:
        """Note what a run reads besides its config. Raises UserError where a resumed one reads other things."""
        begun, source = self.source, strict(source)
        if not begun:
            write_json(self.path / SOURCE, source)
            return
        for name in sorted(begun.keys() | source.keys()):
            before, found = begun.get(name), source.get(name)
            if before != found:
                raise UserError(
                    f"{self.path} was started with {name} {before}, but now {found} is found; give the former, or "
                    "another folder"
                )

    @property
    def source(self) -> dict:
        """What the training that began here reads besides its config, as `keep_to` noted it."""
        return self.read(SOURCE)

    @property
    def attempts(self) -> list[dict]:
        """The facts of each start of this run so far; see `note_attempt`."""
        begun = self.facts()
        return begun["attempts"] if begun.get("id") == self.id else []

    def facts(self) -> dict:
        """Return the content of run.json: id, command and attempts; {} where nothing began."""
        return self.read(FACTS)

    def read(self, name: str) -> dict:
        """Return the content of a JSON file of the folder, {} where there is none."""
        file = self.path / name
        return read_json(file) if file.is_file() else {}

    def finish(self, result: dict) -> None:
        """Mark the run as finished and keep its numbers."""
        write_json(self.path / self.result, result)

    def curve(self) -> Curve:
        """Return every number that was logged, by step, as if the run had never been interrupted."""
        curve: Curve = {}
        for i, attempt in enumerate(self.attempts):  # each replaces what was logged from the step where it resumed
            curve = {step: row for step, row in curve.items() if step < attempt["done_steps"]}
            for step, row in read_csv(self.path / "metrics" / f"version_{i}" / "metrics.csv").items():
                curve.setdefault(step, {}).update(row)
        return dict(sorted(curve.items()))

    def metrics_at(self, step: int) -> dict[str, float]:
        """Return the metrics that validation logged of a step's weights; {} where there are none."""
        logged = self.curve().get(step - 1, {})  # the number that Lightning gives the step
        return {name: value for name, value in logged.items() if name.startswith("eval/")}

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.path / "checkpoints")

    @property
    def checkpoint_step(self) -> int:
        """Of the newest checkpoint, 0 without one."""
        newest = self.checkpoints.newest()
        return step_of(newest) if newest else 0

    @property
    def best(self) -> BestFolder:
        """The weights that are exported: those with the highest acceptance, or the last."""
        return BestFolder(self.path / "checkpoints" / "best")

    def weights(self, which: str) -> tuple[int, dict[str, Tensor]]:
        """Return step and weights to export: "best", those that training exports or would, or "last".

        Without an expected tau `checkpoints/best` holds the last step of some attempt; a newer checkpoint replaces it.
        Raises UserError where there are none.
        """
        best, newest = self.best.read(), self.checkpoints.newest()
        selected = best is not None and (best.expected is not None or best.step >= self.checkpoint_step)
        if selected and which == "best":
            return best.step, self.best.weights()
        if newest is None:
            raise UserError(f"run={self.path} has no checkpoint yet; train until it has saved one")
        return step_of(newest), whole_weights(newest)

    def export(self, out: str | None, write: Callable[[Path, Path], None]) -> Path:
        """Fill the export folder through `write(folder, folder that it will appear as)`, and return it.

        The export of a killed attempt, and of the run which this one replaces, is replaced; another run's never.
        """
        with self.export_folder(out) as folder:
            write_json(self.path / EXPORT, {"out": str(folder.resolve())})  # after a kill the run may replace it
            write_folder(folder, lambda temporary: write(temporary, folder), replace=True)
        return folder

    @contextmanager
    def export_folder(self, out: str | None) -> Iterator[Path]:
        """Lock the folder to which the run is exported and yield it. UserError where it exists or cannot be made.

        Without `out` it lies below `checkpoints/` and has the run's name.
        """
        folder = Path(out) if out else CHECKPOINTS / self.name
        with locked(folder, otherwise=" and run the same command again"):
            if self.read(EXPORT).get("out") != str(folder.resolve()):
                refuse_existing(folder)
            yield folder


def read_csv(file: Path) -> Curve:
    """Read a metrics.csv by step; two rows of one step (training, validation) become one. {} where there is none."""
    curve: Curve = {}
    if file.is_file():
        with file.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(line for line in lines if line.endswith("\n")):  # a kill may have cut the last
                values = {name: float(value) for name, value in row.items() if value and name not in ("step", "epoch")}
                curve.setdefault(int(row["step"]), {}).update(values)
    return curve


def run_of_agent() -> str | None:
    """The W&B run for which the agent of a sweep started this process; None elsewhere."""
    return os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None


def plain_name(name: str) -> str:
    """Replace the characters that W&B takes in no ids and artifacts: a folder may be called k=1,loss=hard."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def hashed(config: Mapping) -> dict:
    """Return the options that what is trained depends on."""
    kept = {key: value for key, value in config.items() if key not in NOT_HASHED}
    kept = EARLIER | kept if "trainer" in config else kept
    for name, left_out in NOT_HASHED_OF.items() if "trainer" in config else ():  # a measurement stays where it began
        if isinstance(node := kept.get(name), Mapping):
            if name == "trainer" and "deepspeed" not in str(node.get("strategy")):  # others share their checkpoints
                left_out = (*left_out, "strategy")
            kept[name] = {key: value for key, value in node.items() if key not in left_out}
    return _without(kept, LATER)


def _without(config: Mapping, defaults: Mapping) -> dict:
    """Return the options of a config that do not have these values."""
    return {
        name: _without(value, default) if isinstance(default := defaults.get(name), Mapping) else value
        for name, value in config.items()
        if name not in defaults or value != defaults[name]
    }
