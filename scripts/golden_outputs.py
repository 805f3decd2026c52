"""Record the outputs of the project's commands, and compare two records: restructuring the code must not change them.

    python scripts/golden_outputs.py record --out /tmp/golden/before --code /path/to/another/checkout
    python scripts/golden_outputs.py record --out /tmp/golden/after
    python scripts/golden_outputs.py compare /tmp/golden/before/golden.json /tmp/golden/after/golden.json

Everything is done with commands, because commands are contracts and names of modules are not. So nothing of the project
is imported here. golden_outputs.txt lists the commands and what is kept of them. Each part of a record has a folder of
its own below `<out>/work`, a log in `<out>/logs` and its values in `<out>/parts`. A part that has values is not run
again. `<out>/golden.json` holds the values of all parts by name. Small values are kept as they are, others as the
beginning of their sha256, with the content itself in `<out>/contents/`. Both records must be made on one machine, with
the same Python and the same libraries.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from datasets import load_from_disk
from safetensors import safe_open

SHORT = 60  # characters of a value that stands in golden.json itself
COMMAND_LIMIT_S = 1200
TABLE = Path(__file__).with_suffix(".txt")  # the parts

# Keys and columns that are not recorded wherever they stand. All but the first differ between two runs of one code.
DROPPED = {
    "_target_",  # names of modules, which may move
    *("date", "command", "versions", "device", "machine"),  # when, how and on what; all options stand in config.yaml
    *(
        "seconds",
        "time_s",
        "prefill_s",
        "outside_s",
        "time_share",
        "peak_memory_bytes",
    ),  # of bench
    *("tokens_per_s", "tokens_per_s_micro", "tokens_per_s_micro_ci95", "tokens_per_s_macro", "speedup", "speedup_ci95"),
    *("train/tokens_per_s", "train/wait_share"),  # of trainings
    *("times", "best", "predicted_tokens_per_s", "predicted_tokens_per_s_ci95"),  # of tune method=specdecpp, whose best
    *("theorem_tokens_per_s", "measured_tokens_per_s"),  # settings are chosen by seconds
}


@dataclass(frozen=True)
class Part:
    """A paragraph of the table."""

    name: str
    commands: list[str]
    collects: list[list[str]]  # methods of `Values`, with their arguments

    @property
    def needs(self) -> list[str]:
        """The parts whose folders the commands read."""
        return sorted(set(re.findall(r"\.\./([\w-]+)/", " ".join(self.commands))))


def read_parts(table: str) -> dict[str, Part]:
    """The parts by name, in their order."""
    table = re.sub(r"\\\n *", "", table)
    for word, meaning in re.findall(r"^([A-Z]+) = (.*)$", table, re.MULTILINE):
        table = table.replace(f"{{{word}}}", meaning)
    parts = {}
    for name, *lines in (paragraph.splitlines() for paragraph in table.strip().split("\n\n")[2:]):
        collects = [one.split() for line in lines if line[0] == ">" for one in line[2:].split(", ")]
        parts[name] = Part(name, [line[2:] for line in lines if line[0] == "$"], collects)
    return parts


class Values:
    """The values of a part, as they are collected from its folder; the table names the methods."""

    def __init__(self, out: Path, part: str, code: Path) -> None:
        self.out, self.part, self.code = out, part, code
        self.folder = out / "work" / part
        self.found: dict[str, object] = {}
        self.dropped: set[str] = set()
        self.stdout: dict[str, str] = {}  # by command

    def put(self, name: str, value: object) -> None:
        """Keeps a value without what is not recorded; a large one as a digest, with its content beside it."""
        value, name = self.plain(value), f"{self.part}/{name}"
        assert name not in self.found, name
        text = json.dumps(value, sort_keys=True)
        if len(text) > SHORT:
            file = self.out / "contents" / f"{re.sub(r'[^A-Za-z0-9_.=+-]', '-', name)}.json"
            file.write_text(json.dumps(value, sort_keys=True, indent=1) + "\n")
            value = f"sha256 {digest(text.encode())}"
        self.found[name] = value

    def put_each(self, name: str, values: Mapping[str, object]) -> None:
        """Keeps the entries of a dict one by one, so that a difference is named closely."""
        for key, value in values.items():
            if key in DROPPED:
                self.dropped.add(key)
            else:
                self.put(f"{name}/{key}", value)

    def plain(self, value: object) -> object:
        """The value without dropped keys and without the names of this record's folders."""
        if isinstance(value, dict):
            self.dropped |= value.keys() & DROPPED
            return {str(key): self.plain(one) for key, one in value.items() if key not in DROPPED}
        if isinstance(value, list | tuple):
            return [self.plain(one) for one in value]
        return (
            value.replace(str(self.out), "<out>").replace(str(self.code), "<code>") if isinstance(value, str) else value
        )

    def one(self, pattern: str) -> Path:
        """The one path below the folder that fits a pattern."""
        (found,) = self.folder.glob(pattern)
        return found

    def json(self, pattern: str) -> None:
        self.put_each(pattern, json.loads(self.one(pattern).read_text()))

    def yaml(self, pattern: str) -> None:
        self.put_each(pattern, yaml.safe_load(self.one(pattern).read_text()))

    def lines(self, pattern: str) -> None:
        """The rows of a file of JSON lines, in one value."""
        self.put(pattern, [json.loads(line) for line in self.one(pattern).read_text().splitlines()])

    def run(self, pattern: str) -> None:
        """A training: its name, its files, its config, its curve column by column, its result."""
        folder = self.one(pattern)
        self.put(f"{pattern}/name and files", [folder.name, sorted(path.name for path in folder.iterdir())])
        self.yaml(f"{pattern}/config.yaml")
        self.json(f"{pattern}/result.json")
        with (folder / "metrics/version_0/metrics.csv").open() as lines:
            rows = list(csv.DictReader(lines))
        self.put_each(f"{pattern}/metrics.csv", {column: [row[column] for row in rows] for column in rows[0]})

    def export(self, pattern: str) -> None:
        """An exported folder: which files it has, its weights, its JSON files, digests of all others but the prose."""
        folder = self.one(pattern)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        self.put(f"{pattern}/files", [str(file.relative_to(folder)) for file in files])
        for file in (file for file in files if file.suffix != ".md"):
            if file.suffix == ".safetensors":
                content = tensors(file)
            elif file.suffix == ".json" and file.name != "tokenizer.json":
                content = json.loads(file.read_text())
            else:
                content = digest(file.read_bytes())
            self.put(f"{pattern}/{file.relative_to(folder)}", content)

    def store(self, pattern: str) -> None:
        """A store: its manifest, digests of its files, and its rows where it is a folder of `datasets`."""
        folder = self.one(pattern)
        self.json(f"{pattern}/manifest.json")
        self.put_each(pattern, {f.name: digest(f.read_bytes()) for f in folder.iterdir() if f.name != "manifest.json"})
        if list(folder.glob("*.arrow")):
            self.put(f"{pattern}/rows", load_from_disk(str(folder)).to_list())

    def bench(self, pattern: str) -> None:
        """A benchmark: of each method the texts, what it drafted and what was accepted, its results; and the config."""
        folder = self.one(pattern)
        rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
        rows.sort(key=lambda row: row["question_id"])
        texts = {"replies", "text", "finish_reasons", "prompt_tokens", "error"}
        for method in sorted({row["method"] for row in rows}):
            own = [row for row in rows if row["method"] == method]
            for name, keys in {"texts": texts, "counts": rows[0].keys() - texts}.items():
                self.put(f"{pattern}/{method}/{name}", [{key: row[key] for key in keys} for row in own])
        results = json.loads((folder / "results.json").read_text())
        self.put_each(f"{pattern}/results", results.pop("methods"))
        self.put_each(f"{pattern}/results.json", results)
        self.yaml(f"{pattern}/config.yaml")

    def printed(self) -> None:
        """What the commands print, but for lines with names of modules or with rates."""
        for command, text in self.stdout.items():
            lines = [line for line in text.splitlines() if "_target_:" not in line and "tokens/s" not in line]
            self.put(f"printed by {command}", lines)

    def shown(self, page: str) -> None:
        """Which runs and measurements a report shows: the anchors of their sections."""
        self.put("shown", sorted(re.findall(r'id="run-([^"]*)"', self.one(page).read_text())))


def digest(content: bytes) -> str:
    """The beginning of an sha256."""
    return hashlib.sha256(content).hexdigest()[:16]


def tensors(file: Path) -> dict[str, str]:
    """Type, shape and digest of each tensor of a safetensors file."""
    with safe_open(file, "pt") as opened:
        found = {name: opened.get_tensor(name).contiguous() for name in sorted(opened.keys())}
    content = {name: one.flatten().view(torch.uint8).numpy().tobytes() for name, one in found.items()}
    return {name: f"{one.dtype} {list(one.shape)} {digest(content[name])}" for name, one in found.items()}


def record(out: Path, code: Path, only: list[str], jobs: int) -> None:
    """Runs the parts that are asked for, and those that they need, where they have no values yet."""
    for name in ("work", "logs", "parts", "contents"):
        (out / name).mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(code),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }
    asking = [sys.executable, "-c", "import spectrain; print(spectrain.__file__)"]
    place = subprocess.run(asking, env=environment, cwd=out, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(place).is_relative_to(code):
        raise SystemExit(f"commands would run {place}, not the code of {code}")
    parts = read_parts(TABLE.read_text())
    started: dict[str, Future] = {}
    with ThreadPoolExecutor(jobs) as pool:  # a part is begun after those that it needs, so what it waits for is at work

        def start(name: str) -> Future:
            if name not in started:
                waits = [start(other) for other in parts[name].needs]
                started[name] = pool.submit(run_part, parts[name], waits, out, code, environment)
            return started[name]

        for one in [start(name) for name in only or parts]:
            one.result()
    files = sorted((out / "parts").glob("*.json"))
    values = {name: value for file in files for name, value in json.loads(file.read_text()).items()}
    (out / "golden.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    print(f"{out / 'golden.json'}: {len(values)} values of {len(files)} of {len(parts)} parts")


def run_part(part: Part, waits: list[Future], out: Path, code: Path, environment: dict[str, str]) -> None:
    """Types the commands of a part in an empty folder, and keeps its log and what is collected."""
    for one in waits:
        one.result()
    file, values, start_s = out / "parts" / f"{part.name}.json", Values(out, part.name, code), time.monotonic()
    if file.is_file():
        return
    shutil.rmtree(values.folder, ignore_errors=True)
    values.folder.mkdir()
    with (out / "logs" / f"{part.name}.log").open("w") as log:
        for command in part.commands:
            program, *words = shlex.split(command)
            typed = [sys.executable, "-m", program if "." in program else f"spectrain.{program}", *words]
            where, begun_s = {"cwd": values.folder, "env": environment}, time.monotonic()
            done = subprocess.run(typed, **where, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
            values.put(f"exit code of {command}", done.returncode)
            values.stdout[command] = done.stdout
            print(f"$ {command}\n{done.stdout}{done.stderr}", file=log)
            print(f"exit code {done.returncode} after {time.monotonic() - begun_s:.1f} s\n", file=log, flush=True)
        for method, *arguments in part.collects:
            try:
                getattr(values, method)(*arguments)
            except (OSError, ValueError, KeyError) as error:  # where a command failed; its values are missing then
                for place in (log, sys.stdout):
                    print(f"NOT COLLECTED of {part.name}: {type(error).__name__}: {error}", file=place, flush=True)
        print(f"keys that were dropped: {', '.join(sorted(values.dropped))}", file=log)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(values.found, indent=1, sort_keys=True) + "\n")
    temporary.rename(file)
    print(f"{part.name}: {len(values.found)} values in {time.monotonic() - start_s:.0f} s", flush=True)


def compare(one: Path, other: Path) -> int:
    """Prints a line for each name whose values differ; returns how many."""
    ours, theirs = json.loads(one.read_text()), json.loads(other.read_text())
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name, "-") != theirs.get(name, "-"))
    for name in names:
        print(f"{name}: {ours.get(name, 'missing')} | {theirs.get(name, 'missing')}")
    print(f"{len(names)} of {len(ours.keys() | theirs.keys())} values differ")
    return len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record")
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("--code", type=Path, default=Path(__file__).resolve().parent.parent)
    recording.add_argument("--only", default="", help="names of parts, with commas between them")
    recording.add_argument("--jobs", type=int, default=2, help="commands at a time")
    comparing = actions.add_parser("compare")
    comparing.add_argument("records", type=Path, nargs=2)
    given = parser.parse_args()
    if given.action == "compare":
        raise SystemExit(compare(*given.records) > 0)
    record(given.out.resolve(), given.code.resolve(), [name for name in given.only.split(",") if name], given.jobs)


if __name__ == "__main__":
    main()
