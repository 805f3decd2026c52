"""Compare two folders in which the same command ended, once undisturbed and once after kills or beside another."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spectrain.stores.folder import read_json, sha256
from spectrain.training.curves import Curve
from spectrain.training.runs import RunFolder

LOST, DOUBLED, DIFFERENT, LEFT = KINDS = ("lost", "doubled", "different", "left behind")
METRICS_BY_THE_CLOCK = ("train/tokens_per_s", "train/wait_share")  # metrics that differ between equal runs
# Keys of JSON files and rows that differ between equal runs.
BY_THE_CLOCK = re.compile(
    "date|started|attempts|out|seconds|time_s|time_share|prefill_s|outside_s|peak_memory_bytes|speedup.*|tokens_per_s.*|gammas|fastest_gamma"
)
ROW_KEYS = (("question_id", "method"), ("group", "method", "nodes"), ("id",))  # what is there once in a file of rows
UNCOMPARED = (".ckpt", ".txt")  # checkpoints hold clocks
OUTPUT = ".output*"  # what commands printed
Key = tuple[object, ...]


@dataclass(frozen=True)
class Difference:
    """Something that a kill or a second process must not have done."""

    kind: str  # one of KINDS
    what: str


def differences(whole: Path, made: Path, by_the_clock: Sequence[str] = ()) -> list[Difference]:
    """Compare all that a command made; `by_the_clock`: names of files that only have to be there."""
    expected, found = (_files(folder) for folder in (whole, made))
    wrong = [Difference(LOST, f"{name} is missing") for name in sorted(expected - found)]
    for name in sorted(expected & found):
        if not any(Path(name).match(pattern) for pattern in by_the_clock):
            wrong += _of_file(whole / name, made / name, name)
    for one, other in zip(runs_in(whole), runs_in(made), strict=False):
        curves = [without_clock(run.curve()) for run in (one, other)]
        steps = [s for s in curves[0].keys() | curves[1].keys() if curves[0].get(s) != curves[1].get(s)]
        if steps:
            wrong.append(Difference(DIFFERENT, f"the curve of {one.name} differs at steps {sorted(steps)[:5]}"))
    return wrong + [Difference(LEFT, f"{name} was left behind") for name in sorted(found - expected)]


def runs_in(folder: Path) -> Iterator[RunFolder]:
    """Yield all trainings below a folder."""
    for file in sorted(folder.rglob("run.json")):
        yield RunFolder(file.parent, {}, read_json(file)["id"])


def without_clock(curve: Curve) -> Curve:
    """The curve without what depends on the machine's speed: equal runs have equal ones."""
    return {step: {k: v for k, v in row.items() if k not in METRICS_BY_THE_CLOCK} for step, row in curve.items()}


def _files(folder: Path) -> set[str]:
    """Names of files, and of folders that are empty. Each attempt of a training has a folder of metrics of its own."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir() or not any(path.iterdir()))
    names = {path.relative_to(folder) for path in paths if not path.match(OUTPUT) and path.name != "log.txt"}
    return {str(name) for name in names if not {"metrics", "wandb"} & set(name.parts)}


def _of_file(expected: Path, made: Path, name: str) -> list[Difference]:
    if expected.is_dir() and made.is_dir():
        return []
    if expected.suffix == ".jsonl":
        return _of_rows(*(_rows(file) for file in (expected, made)), name)
    by_suffix: dict[str, Callable[[Path], object]] = {
        ".json": lambda file: _timeless(_run_facts(read_json(file)) if file.name == "run.json" else read_json(file)),
        ".html": lambda file: file.read_text().rstrip().endswith("</html>"),
        **dict.fromkeys(UNCOMPARED, Path.exists),
    }
    read = by_suffix.get(expected.suffix, sha256)
    return [] if read(expected) == read(made) else [Difference(DIFFERENT, f"{name} differs")]


def _of_rows(expected: dict[Key, list[object]], made: dict[Key, list[object]], name: str) -> list[Difference]:
    wrong = []
    for key, rows in expected.items():
        found = made.get(key, [])
        if len(found) < len(rows):
            wrong.append(Difference(LOST, f"{name} lacks {key}"))
        elif len(found) > len(rows):
            wrong.append(Difference(DOUBLED, f"{name} has {key} {len(found)} times"))
        elif found != rows:
            wrong.append(Difference(DIFFERENT, f"{name} has another {key}"))
    return wrong + [Difference(LEFT, f"{name} has {key} besides") for key in made if key not in expected]


def _rows(file: Path) -> dict[Key, list[object]]:
    """The rows of a file by what names them, without what the clock says. A line that is no row stands for itself."""
    found: dict[Key, list[object]] = {}
    for line in file.read_text().splitlines():
        try:
            row = _timeless(json.loads(line))
        except ValueError:
            row = line
        found.setdefault(key_of(row), []).append(row)
    return found


def key_of(row: object) -> Key:
    """Return the values that identify a row in its file; for a row of an unknown kind, the whole row."""
    names = next((keys for keys in ROW_KEYS if isinstance(row, dict) and row.keys() >= set(keys)), None)
    return tuple(row[name] for name in names) if names else (json.dumps(row),)


def _run_facts(facts: dict) -> dict:
    return {key: value for key, value in facts.items() if key != "id"}  # drawn by chance


def _timeless(value: object) -> object:
    """Plain values without what depends on the speed of the machine, or on the day."""
    if isinstance(value, dict):
        return {key: _timeless(entry) for key, entry in value.items() if not BY_THE_CLOCK.fullmatch(key)}
    return [_timeless(entry) for entry in value] if isinstance(value, list) else value
