"""Find and read what `spectrain.report` shows: run folders, and JSON files of measurements.

What cannot be read is noted with the reason and left out; nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from typing_extensions import TypedDict

from spectrain.errors import UserError
from spectrain.reporting.runs import MEASUREMENTS, RUNS, TRAININGS, Run, Training
from spectrain.stores.environment import date_of
from spectrain.stores.folder import read_json
from spectrain.stores.lines import read_lines
from spectrain.stores.typed import MORE, from_json
from spectrain.stores.yaml_files import read_yaml
from spectrain.training.curves import Curve, merged, read_csv
from spectrain.training.run_facts import Facts, TrainingResult
from spectrain.training.runs import RunFolder

NOT_ENTERED = ("checkpoints", "metrics", "wandb", "node_modules", "__pycache__")  # parts of runs; and big
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, UserError)


class BenchResults(TypedDict):
    """The part of a benchmark's results.json that the page reads."""

    __pydantic_config__ = MORE
    methods: dict[str, dict[str, object]]


class Search(TypedDict):
    """The part of the results of `spectrain.tune` that is read here."""

    __pydantic_config__ = MORE


class Collection:
    """All runs below some folders, and what could not be read: file or folder -> reason."""

    def __init__(self, runs: Iterable[Run] = (), unreadable: Mapping[str, str] | None = None) -> None:
        self.runs, self.unreadable = list(runs), dict(unreadable or {})

    @classmethod
    def of(cls, roots: Sequence[Path], max_folders: int) -> Collection:
        """Read everything below the roots. Raises UserError where they hold more than max_folders folders."""
        found, folders = cls(), {}
        for root in roots:
            for folder in folders_below(root):
                folders[folder.resolve()] = folder
                if len(folders) > max_folders:
                    where = f"runs={', '.join(map(str, roots))} holds more than {max_folders} folders"
                    raise UserError(f"{where}; give the folder that holds runs, or raise max_folders")
        folders = list(folders.values())
        names = names_of([folder for folder in folders if (folder / "config.yaml").is_file()])
        for folder in folders:
            found.add_folder(folder, names.get(folder, ""))
        return found

    def of_kind(self, *kinds: str) -> list[Run]:
        return [run for run in self.runs if run.kind in kinds]

    def add_folder(self, folder: Path, name: str) -> None:
        """Add the run that a folder is, and the measurements that lie in it."""
        before = len(self.runs)
        config = self.read(folder / "config.yaml", read=read_yaml)
        kind = config.get("kind") if config else None
        if kind in RUNS:
            try:
                self.runs.append(self.run(folder, name, config))
            except BROKEN as error:
                self.unreadable[str(folder)] = reason(error)
        for file in sorted(filter(Path.is_file, folder.glob("*.json"))):
            self.add_measurement(file)
        if config and kind not in RUNS and len(self.runs) == before:
            why = f"config.yaml has kind={kind}, which this page does not show"
            why = f"a run of kind {kind} that has not finished" if kind in MEASUREMENTS else why
            self.unreadable.setdefault(str(folder), why)

    def run(self, folder: Path, name: str, config: dict) -> Run:
        """Read a run folder."""
        begun = self.read(folder / "run.json", Facts) or {}
        run = {"name": name, "kind": config["kind"], "path": folder, "config": config, "begun": begun}
        run["seen"] = last_written(folder)
        if run["kind"] in TRAININGS:
            trained = RunFolder(folder, config, begun.get("id", ""))
            run |= {
                "result": self.read(folder / "result.json", TrainingResult),
                "checkpoint_step": trained.checkpoint_step,
            }
            return Training(**run, curve=self.curve(trained))
        if run["kind"] == "bench":
            rows = [row for row in read_lines(folder / "questions.jsonl") if isinstance(row, dict) and "method" in row]
            return Run(**run, result=self.read(folder / "results.json", BenchResults), rows=rows)
        search = Run(**run).search
        run["result"] = self.read(folder / ("results.json" if search == "specdecpp" else "result.json"), Search)
        return Run(**run)

    def read(
        self, file: Path, kind: type = dict[str, object], read: Callable[[Path], object] = read_json
    ) -> dict | None:
        """Read a mapping; None where there is no such file, or it is damaged or not of this kind, which is noted."""
        if not file.is_file():
            return None
        try:
            content = read(file)
            from_json(kind, content)
        except BROKEN as error:
            self.unreadable[str(file)] = reason(error)
            return None
        return content

    def curve(self, run: RunFolder) -> Curve:
        """All attempts as one; of older runs, which kept no attempts, each file from its first step on."""
        try:
            if run.attempts:
                return run.curve()
            files = sorted(run.path.glob("metrics/version_*/metrics.csv"), key=lambda file: int(file.parent.name[8:]))
            return merged([(min(read_csv(file), default=0), file) for file in files])
        except BROKEN as error:
            self.unreadable[str(run.path / "metrics")] = reason(error)
            return {}

    def add_measurement(self, file: Path) -> None:
        """Add a JSON file of measurements, with the pictures that it names; other files are left alone."""
        if file.name in ("run.json", "result.json", "results.json"):
            return
        with file.open("rb") as start:  # says whether it may be one, which spares reading every JSON file there is
            beginning = start.read(4096).decode(errors="replace")
        content = self.read(file) if any(f'"{kind}"' in beginning for kind in MEASUREMENTS) else None
        if content is None or content.get("kind") not in MEASUREMENTS:
            return
        pictures = {}
        for figure in content.get("figures") or ():
            name = Path(str(figure.get("file"))).name  # beside the file, nowhere else
            try:
                pictures[name] = (file.parent / name).read_bytes()
            except OSError as error:
                self.unreadable[str(file.parent / name)] = reason(error)
        kind, folder = content["kind"], file.parent.resolve().name
        name = folder if file.stem == kind else f"{folder}/{file.stem}"
        self.runs.append(Run(name, kind, file, result=content, seen=last_written(file), pictures=pictures))


def folders_below(root: Path) -> Iterator[Path]:
    """The root and the folders below it, in the order of their names; links are not followed, hidden ones left out."""
    for folder, inner, _ in os.walk(root):
        is_run = (Path(folder) / "config.yaml").is_file()
        inner[:] = sorted(name for name in inner if not name.startswith(".") and not (is_run and name in NOT_ENTERED))
        yield Path(folder)


def names_of(folders: Sequence[Path]) -> dict[Path, str]:
    """Each run's own name, with the folders above it where two share one."""
    parts = {folder: folder.resolve().parts for folder in folders}
    names = {}
    for folder, own in parts.items():
        n = 1
        while n < len(own) and any(other[-n:] == own[-n:] for other in parts.values() if other != own):
            n += 1
        names[folder] = "/".join(own[-n:])
    return names


def last_written(path: Path) -> str | None:
    """When a file, or what lies in a folder, was last written."""
    files = [path] if path.is_file() else [*path.glob("*"), *path.glob("metrics/*/*")]
    times = [file.stat().st_mtime for file in files if file.is_file()]
    return date_of(max(times)) if times else None


def reason(error: Exception) -> str:
    """An error as one line, which need not name the file."""
    if isinstance(error, UserError) and isinstance(error.__cause__, ValueError):
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = (str(error).splitlines() or [""])[0]
    says_little = isinstance(error, KeyError | TypeError | AttributeError)
    return f"{type(error).__name__}: {line}" if says_little else line
