"""What a folder of runs was found to hold, as plain values: what `python -m spectrain.report` shows."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spectrain.reporting.formats import number
from spectrain.stores.budget_table import BudgetTable

Curve = Mapping[int, Mapping[str, float]]  # step -> metric -> value

OWN_METHOD = {"spire": "spire", "vanilla": "speculative"}  # kind of training -> its drafter's name in a table of tau


@dataclass(frozen=True)
class Run:
    """What all runs have."""

    name: str  # no other run of the page has it
    folder: Path
    config: Mapping  # resolved
    attempts: Sequence[Mapping] = ()  # of run.json: when, where, with which code
    command: str | None = None
    seen: str | None = None  # when its files were last written to

    @property
    def target(self) -> str:
        """The target's name; empty where the run made one."""
        return short_path((self.config.get("target") or {}).get("path") or "") if self.kind != "target" else ""

    @property
    def kind(self) -> str:
        return str(self.config["kind"])

    @property
    def facts(self) -> Mapping:
        """Of results: date, device, versions, where they are there."""
        return {}

    @property
    def anchor(self) -> str:
        """Where a page tells of it; not every character of a name is fit for an id."""
        return "run-" + "".join(c if c.isalnum() else f"-{ord(c):x}-" for c in self.name)


@dataclass(frozen=True)
class Training(Run):
    """A run of `spectrain.train`, finished or not."""

    target_fingerprint: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)  # that change what is trained, by dotted key
    curve: Curve = field(default_factory=dict)
    result: Mapping | None = None  # None: unfinished
    checkpoint_step: int = 0  # of the newest checkpoint

    @property
    def steps(self) -> int:
        """Steps that were done."""
        if self.result is not None:
            return int(number(self.result.get("steps")) or 0) or self._logged
        return max(self._logged, self.checkpoint_step)

    @property
    def _logged(self) -> int:
        """Lightning gives the first step number 0, and what is logged behind the last one the number of steps."""
        trained = [step for step, row in self.curve.items() if "train/loss" in row]
        return max(trained, default=-1) + 1

    @property
    def asked_steps(self) -> int | None:
        value = number(self.config.get("max_steps"))
        return int(value) if value else None

    @property
    def tokens_a_step(self) -> int | None:
        """Of packed rows; None where rows differ in length."""
        if self.kind == "specdecpp":
            return None
        data, trainer = self.config.get("data") or {}, self.config.get("trainer") or {}
        parts = [data.get("batch_size"), data.get("row_tokens"), trainer.get("accumulate_grad_batches", 1)]
        if not all(number(part) for part in parts):
            return None
        return int(parts[0]) * int(parts[1]) * int(parts[2])

    @property
    def tokens(self) -> int | None:
        told = number((self.result or {}).get("tokens"))
        if told is not None:
            return int(told)
        return self.steps * self.tokens_a_step if self.tokens_a_step else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """What validation said last, or of the exported weights."""
        if self.result is not None:
            found = self.result.get("metrics")
            return found if isinstance(found, Mapping) else self.result
        last: dict[str, float] = {}
        for row in self.curve.values():
            last |= {name: value for name, value in row.items() if name.startswith("eval/")}
        return last

    @property
    def tau(self) -> Mapping[str, Mapping]:
        """Of its own drafter after training: "256 tokens, greedy" -> value, low, high."""
        found = ((self.result or {}).get("tau") or {}).get(OWN_METHOD.get(self.kind, ""))
        return found if isinstance(found, Mapping) else {}

    @property
    def contexts(self) -> int | None:
        """That each tau was measured on."""
        value = number(((self.result or {}).get("settings") or {}).get("contexts"))
        return int(value) if value else None


@dataclass(frozen=True)
class Benchmark(Run):
    """A run of `spectrain.bench`."""

    results: Mapping | None = None  # None: unfinished
    rows: Sequence[Mapping] = ()  # of questions.jsonl

    @property
    def facts(self) -> Mapping:
        return self.results or {}


@dataclass(frozen=True)
class Tuning(Run):
    """A run of `spectrain.tune`; `search` is budget, sssd or specdecpp."""

    search: str = ""
    result: Mapping | None = None  # None: unfinished
    table: BudgetTable | None = None

    @property
    def facts(self) -> Mapping:
        return {**self.table.facts, **self.table.machine} if self.table else self.result or {}


@dataclass(frozen=True)
class Measurement(Run):
    """A JSON file with a `kind` of its own, and the pictures that it names."""

    content: Mapping = field(default_factory=dict)
    pictures: Mapping[str, bytes] = field(default_factory=dict)  # file name -> PNG

    @property
    def kind(self) -> str:
        return str(self.content["kind"])

    @property
    def target(self) -> str:
        target = self.content.get("target")
        return short_path(target) if isinstance(target, str) else ""

    @property
    def facts(self) -> Mapping:
        return self.content


@dataclass(frozen=True)
class Found:
    """Everything below the folders that were given."""

    trainings: Sequence[Training] = ()
    benchmarks: Sequence[Benchmark] = ()
    tunings: Sequence[Tuning] = ()
    measurements: Sequence[Measurement] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)  # file or folder -> reason

    def all(self) -> list[Run]:
        return [*self.trainings, *self.benchmarks, *self.tunings, *self.measurements]


def groups(trainings: Iterable[Training]) -> dict[tuple[str, str], list[Training]]:
    """Trainings that can be compared: (kind, target) -> runs, by name."""
    found: dict[tuple[str, str], list[Training]] = {}
    for run in sorted(trainings, key=lambda run: natural(run.name)):
        found.setdefault((run.kind, run.target_fingerprint or run.target), []).append(run)
    return found


def differences(runs: Sequence[Training]) -> dict[str, dict[str, object]]:
    """Run -> the options in which it differs from most others; where no value is that of most, everybody's is told.

    An option that some of them do not know, being older, does not count.
    """
    found: dict[str, dict[str, object]] = {run.name: {} for run in runs}
    for key in runs[0].options:
        if not all(key in run.options for run in runs):
            continue
        values = [run.options[key] for run in runs]
        (usual, n), *others = Counter(map(repr, values)).most_common()
        for run, value in zip(runs, values, strict=True):
            if others and (n <= len(runs) / 2 or repr(value) != usual):
                found[run.name][key] = value
    return found


def option_text(key: str, value: object) -> str:
    """An option as it is typed, `w_rej=12`; paths by their last part."""
    if value is None or isinstance(value, bool):
        return f"{key}={json.dumps(value)}"
    return f"{key}={short_path(value) if isinstance(value, str) else value}"


def short_path(text: str) -> str:
    """The last part of a local path; other names, as those of a hub, as they are."""
    return Path(text).name if text.startswith((os.sep, ".", "~")) and Path(text).name else text


def natural(name: str) -> list[tuple[int, int | str]]:
    """Sorts k_2 before k_10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
