"""Compare what two runs of the same command wrote."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

# Facts that differ between equal runs, because the clock, the day or chance gives them.
BY_THE_CLOCK = re.compile(
    r"date|started|attempts|out|.*seconds|.*time_s|.*time_share|.*_s|peak_memory_bytes|other_work|.*speedup.*|.*tokens_per_s.*"
    r"|gammas?|fastest_gamma|.*throughput.*|provenance|command|hardware|environment"
)
NOT_COMPARED = {".ckpt", ".txt", ".html", ".png", ".svg", ".md", ".log", ".yaml", ""}  # only whether they are there


def differences(whole: Path, resumed: Path) -> list[str]:
    """Name the files that a resumed run lost, added or wrote differently than an undisturbed one."""
    expected, found = _files(whole), _files(resumed)
    wrong = [f"{name} is missing" for name in sorted(expected - found)]
    wrong += [f"{name} was left behind" for name in sorted(found - expected)]
    for name in sorted(expected & found):
        if Path(name).suffix not in NOT_COMPARED and _content(whole / name) != _content(resumed / name):
            wrong.append(f"{name} differs")
    if _curves(whole) != _curves(resumed):
        wrong.append("the training curve differs")
    return wrong


def _files(folder: Path) -> set[str]:
    """Names of all files. Each attempt of a training has a folder of metrics of its own, compared by `_curves`."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if not {"metrics", "wandb", ".hydra"} & {*path.parts}}


def _content(file: Path) -> object:
    if file.suffix == ".json":
        value = _timeless(json.loads(file.read_text()))
        return {**value, "id": None} if file.name == "run.json" else value  # a run's id is drawn by chance
    if file.suffix == ".jsonl":  # the order of rows is that in which their parts were done
        rows = (_timeless(json.loads(line)) for line in file.read_text().splitlines())
        return sorted(json.dumps(row, sort_keys=True) for row in rows)
    return file.read_bytes()


def _timeless(value: object) -> object:
    if isinstance(value, dict):
        return {key: _timeless(entry) for key, entry in value.items() if not BY_THE_CLOCK.fullmatch(key)}
    return [_timeless(entry) for entry in value] if isinstance(value, list) else value


def _curves(folder: Path) -> dict[tuple[str, str, str], str]:
    """Return each metric at each step, the last attempt's value where several have one."""
    found = {}
    for file in sorted(folder.rglob("metrics.csv"), key=lambda file: (file.stat().st_mtime_ns, file)):
        run = file.relative_to(folder).parts[0]
        with file.open() as lines:
            for row in csv.DictReader(lines):
                for name, value in row.items():
                    if value and name != "step" and not BY_THE_CLOCK.fullmatch(name):
                        found[run, row.get("step") or "", name] = value
    return found
