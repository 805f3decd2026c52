"""Finds and reads what `spectrain.report` shows: run folders, and JSON files of measurements.

What cannot be read is noted with the reason and left out; nothing is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spectrain.decoding.errors import UserError
from spectrain.reporting.found_runs import Benchmark, Found, Measurement, Run, Training, Tuning
from spectrain.reporting.run_command import command_of
from spectrain.stores.budget_table import BudgetTable
from spectrain.stores.environment import date_of
from spectrain.stores.folder import read_lines
from spectrain.training.checkpoints import CheckpointFolder, step_of
from spectrain.training.runs import NOT_HASHED, NOT_HASHED_OF_TRAINER, Curve, RunFolder, merged, read_csv

TRAININGS = ("spire", "vanilla", "specdecpp", "target")
MEASUREMENTS = ("cost", "drafters", "parity")  # kinds of JSON files
NOT_ENTERED = ("checkpoints", "metrics", "wandb", "node_modules", "__pycache__")  # parts of runs; and big
LARGEST_JSON_BYTES = 64 * 2**20
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, OmegaConfBaseException)


class Finder:
    """Reads folders one after the other into `Found`."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.unreadable: dict[str, str] = {}
        self._seen: set[Path] = set()
        self._names: dict[Path, str] = {}

    def found(self, roots: Sequence[Path]) -> Found:
        """Everything below the roots."""
        folders = [folder for root in roots for folder in folders_below(root)]
        self._names = names_of([folder for folder in folders if (folder / "config.yaml").is_file()])
        for folder in folders:
            if folder.resolve() not in self._seen:
                self._seen.add(folder.resolve())
                self._read(folder)
        runs = self.runs
        return Found(
            *([run for run in runs if isinstance(run, kind)] for kind in (Training, Benchmark, Tuning, Measurement)),
            unreadable=self.unreadable,
        )

    def _read(self, folder: Path) -> None:
        config = self._config(folder)
        kind = config.get("kind") if config else None
        before = len(self.runs)
        if kind in TRAININGS:
            self._noting(folder, lambda: self._training(folder, config))
        elif kind == "bench":
            self._noting(folder, lambda: self._benchmark(folder, config))
        elif kind == "tune":
            self._noting(folder, lambda: self._tuning(folder, config))
        for file in sorted(folder.glob("*.json")):
            self._measurement(file, config)
        if kind in MEASUREMENTS and len(self.runs) == before:
            self.unreadable.setdefault(str(folder), f"a run of kind {kind} that has not finished")
        elif config and kind not in (*TRAININGS, *MEASUREMENTS, "bench", "tune") and len(self.runs) == before:
            self.unreadable[str(folder)] = f"config.yaml has kind={kind}, which this page does not show"

    def _noting(self, path: Path, read: Callable[[], Run]) -> None:
        try:
            self.runs.append(read())
        except BROKEN as error:
            self.unreadable[str(path)] = reason(error)

    def _config(self, folder: Path) -> dict | None:
        file = folder / "config.yaml"
        if not file.is_file():
            return None
        try:
            config = OmegaConf.to_container(OmegaConf.load(file))
            if not isinstance(config, dict):
                raise ValueError("it holds no options")
        except BROKEN as error:
            self.unreadable[str(file)] = reason(error)
            return None
        return config

    def _json(self, file: Path, check: Callable[[dict], None] | None = None) -> dict | None:
        """A JSON object, None where there is none; noted where it is damaged or not as `check` wants it."""
        if not file.is_file():
            return None
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("it holds no JSON object")
            if check is not None:
                check(content)
        except BROKEN as error:
            self.unreadable[str(file)] = reason(error)
            return None
        return content

    def _common(self, folder: Path, config: dict) -> dict:
        """What all runs have, as arguments."""
        begun = self._json(folder / "run.json", check_attempts) or {}
        return {
            "name": self._names[folder],
            "folder": folder,
            "config": config,
            "attempts": begun.get("attempts") or (),
            "command": command_of(config),
            "seen": last_written(folder),
        }

    def _training(self, folder: Path, config: dict) -> Training:
        common = self._common(folder, config)
        begun = self._json(folder / "run.json", check_attempts) or {}
        newest = CheckpointFolder(folder / "checkpoints").newest()
        return Training(
            **common,
            target_fingerprint=begun.get("target_fingerprint"),
            options=trained_options(config),
            curve=self._curve(folder, config, begun),
            result=self._json(folder / "result.json", check_result),
            checkpoint_step=step_of(newest) if newest else 0,
        )

    def _curve(self, folder: Path, config: dict, begun: dict) -> Curve:
        """All attempts as one; of runs that kept no attempts, each file from its first step on."""
        try:
            if begun.get("attempts"):
                return RunFolder(folder, config, begun["id"]).curve()
            files = sorted(folder.glob("metrics/version_*/metrics.csv"), key=lambda f: int(f.parent.name[8:]))
            return merged([(min(read_csv(file), default=0), file) for file in files])
        except BROKEN as error:
            self.unreadable[str(folder / "metrics")] = reason(error)
            return {}

    def _benchmark(self, folder: Path, config: dict) -> Benchmark:
        results = self._json(folder / "results.json", check_methods)
        rows = [row for row in read_lines(folder / "questions.jsonl") if isinstance(row, dict) and "method" in row]
        return Benchmark(**self._common(folder, config), results=results, rows=rows)

    def _tuning(self, folder: Path, config: dict) -> Tuning:
        method = config.get("method") or {}
        search = "budget" if config.get("budget") else str(method["_target_"]).split(".")[-2]
        result = self._json(folder / ("results.json" if search == "specdecpp" else "result.json"))
        table = None
        if search == "budget" and result is not None:
            table = self._budget_table(folder, Path(str(result["budget_table"])))
        return Tuning(**self._common(folder, config), search=search, result=result, table=table)

    def _budget_table(self, folder: Path, file: Path) -> BudgetTable | None:
        """The table that a run names from the folder that it ran in: this one, or one above the run."""
        for above in (Path(), *folder.resolve().parents[:3]):
            if (above / file).is_file():
                try:
                    return BudgetTable.load(above / file)
                except UserError as error:
                    self.unreadable[str(above / file)] = str(error)
                    return None
        self.unreadable[str(folder)] = f"its budget table {file} lies neither here nor in the folders above the run"
        return None

    def _measurement(self, file: Path, config: dict | None) -> None:
        if file.name in ("run.json", "result.json", "results.json") or file.stat().st_size > LARGEST_JSON_BYTES:
            return
        if not mentions_kind(file):
            return
        content = self._json(file)
        if content is None or content.get("kind") not in MEASUREMENTS:
            return
        pictures = {}
        for figure in content.get("figures") or ():
            name = Path(str(figure.get("file"))).name  # beside the file, nowhere else
            try:
                pictures[name] = (file.parent / name).read_bytes()
            except OSError as error:
                self.unreadable[str(file.parent / name)] = reason(error)
        title = f"{file.parent.name}/{file.stem}" if file.stem != content["kind"] else file.parent.resolve().name
        known = {"command": content.get("command"), "seen": last_written(file)}
        self.runs.append(Measurement(title, file, config or {}, **known, content=content, pictures=pictures))


def folders_below(root: Path) -> Iterator[Path]:
    """The root and the folders below it, in the order of their names; links are not followed, hidden ones left out."""
    for folder, inner, _ in os.walk(root):
        is_run = (Path(folder) / "config.yaml").is_file()
        inner[:] = sorted(name for name in inner if not name.startswith(".") and not (is_run and name in NOT_ENTERED))
        yield Path(folder)


def names_of(folders: Sequence[Path]) -> dict[Path, str]:
    """Each run's own name, with the folders above it where two share one."""
    names: dict[Path, str] = {}
    for folder in folders:
        parts, n = folder.resolve().parts, 1
        alike = [other.resolve().parts for other in folders if other.resolve() != folder.resolve()]
        while n < len(parts) and any(other[-n:] == parts[-n:] for other in alike):
            n += 1
        names[folder] = "/".join(parts[-n:])
    return names


def trained_options(config: dict) -> dict[str, object]:
    """What changes the training, by dotted key."""
    found: dict[str, object] = {}

    def add(node: dict, prefix: str) -> None:
        for key, value in node.items():
            if isinstance(value, dict) and value:
                add(value, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = value

    kept = {key: value for key, value in config.items() if key not in NOT_HASHED}
    kept["trainer"] = {k: v for k, v in (kept.get("trainer") or {}).items() if k not in NOT_HASHED_OF_TRAINER}
    add(kept, "")
    return found


def check_methods(results: dict) -> None:
    """Raises ValueError where results of a benchmark hold no methods."""
    if not is_mapping(results.get("methods"), 1):
        raise ValueError("it holds no methods")


def check_result(result: dict) -> None:
    """Raises ValueError where a part of a training's result has another shape than `spectrain.train` gives it."""
    for name, depth in (("metrics", 0), ("selected", 0), ("settings", 0), ("tokens_per_s", 1), ("tau", 2)):
        if not is_mapping(result.get(name) or {}, depth):
            raise ValueError(f"{name} is not as spectrain.train writes it")
    if not all(is_mapping(one, 0) for one in result.get("reliability") or ()):
        raise ValueError("reliability is not as spectrain.train writes it")


def check_attempts(begun: dict) -> None:
    """Raises ValueError where the attempts of run.json are not as runs write them."""
    for attempt in begun.get("attempts") or ():
        if not (is_mapping(attempt, 0) and is_mapping(attempt.get("environment") or {}, 0)):
            raise ValueError("attempts are not as runs write them")


def is_mapping(value: object, depth: int) -> bool:
    """Whether it is a mapping, of mappings down to that depth."""
    return isinstance(value, dict) and (not depth or all(is_mapping(one, depth - 1) for one in value.values()))


def mentions_kind(file: Path) -> bool:
    """Whether a file may hold a measurement: a look at its beginning spares reading every JSON file there is."""
    try:
        with file.open("rb") as content:
            beginning = content.read(4096)
    except OSError:
        return False
    return b'"kind"' in beginning and any(f'"{kind}"'.encode() in beginning for kind in MEASUREMENTS)


def last_written(path: Path) -> str | None:
    """When a file, or what lies in a folder, was last written."""
    files = [path] if path.is_file() else [*path.glob("*"), *path.glob("metrics/*/*")]
    times = [file.stat().st_mtime for file in files if file.is_file()]
    if not times:
        return None
    return date_of(max(times))


def reason(error: Exception) -> str:
    """An error as one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines() or [""]
    told = isinstance(error, KeyError | TypeError | AttributeError)  # whose message alone says little
    return f"{type(error).__name__}: {lines[0]}" if told else lines[0]
