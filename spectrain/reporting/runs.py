"""A run as plain values, and what trainings have in common and in what they differ."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from spectrain.reporting.formats import MISSING, number
from spectrain.training.curves import Curve
from spectrain.training.runs import hashed

OWN_METHOD = {"spire": "spire", "vanilla": "speculative"}  # kind of training -> its drafter's name in a table of tau
TRAININGS = ("spire", "vanilla", "specdecpp", "target")  # kinds of run folders
RUNS = (*TRAININGS, "bench")
MEASUREMENTS = ("cost", "drafters")  # kinds of JSON files


@dataclass(frozen=True)
class Run:
    """A run folder, or a JSON file of measurements."""

    name: str  # no other run of the page has it
    kind: str  # one of RUNS or MEASUREMENTS
    path: Path
    config: Mapping = field(default_factory=dict)  # resolved; empty for a JSON file
    result: Mapping | None = None  # None: unfinished
    begun: Mapping = field(default_factory=dict)  # run.json
    seen: str | None = None  # when its files were last written to
    rows: Sequence[Mapping] = ()  # of a benchmark's questions.jsonl
    pictures: Mapping[str, bytes] = field(default_factory=dict)  # that a JSON file names: file name -> PNG

    @property
    def target(self) -> str:
        """The target's name; empty where the run made one."""
        named = (self.result or {}).get("target") if self.kind in MEASUREMENTS else None
        named = named or (self.config.get("target") or {}).get("path")
        return short_path(named) if isinstance(named, str) and self.kind != "target" else ""

    @property
    def facts(self) -> Mapping:
        """What is told beside the results: date, device, versions."""
        return self.result or {}

    @property
    def environment(self) -> Mapping:
        """Libraries, devices, host and ranks: of the last attempt, or as the results tell them."""
        last = self.attempts[-1] if self.attempts else {}
        return last.get("environment") or self.facts.get("versions") or {}

    @property
    def devices(self) -> str:
        """What it ran on; for a throughput model, the hardware that is modelled."""
        if self.facts.get("device") not in (None, "auto"):
            return str(self.facts["device"])
        if modelled := (self.facts.get("hardware") or {}).get("name"):
            return f"{modelled} (modelled)"
        found = Counter(map(str, self.environment.get("devices") or ()))
        counted = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in found.items())
        accelerator = (self.config.get("trainer") or {}).get("accelerator")
        return counted or str(self.facts.get("device") or accelerator or MISSING)

    @property
    def attempts(self) -> Sequence[Mapping]:
        """When, where and with which code the run was started."""
        return self.begun.get("attempts") or ()

    @property
    def command(self) -> str | None:
        """As it was typed; older trainings did not keep it."""
        return self.begun.get("command") or (self.result or {}).get("command")

    @property
    def anchor(self) -> str:
        """Where a page tells of it; not every character of a name is fit for an id."""
        return "run-" + "".join(c if c.isalnum() else f"-{ord(c):x}-" for c in self.name)


@dataclass(frozen=True)
class Training(Run):
    """A run of `spectrain.train`, finished or not."""

    curve: Curve = field(default_factory=dict)
    checkpoint_step: int = 0  # of the newest checkpoint

    @cached_property
    def options(self) -> dict[str, object]:
        """What changes the training, by dotted key."""
        return dict(flat(hashed(self.config)))

    @property
    def steps(self) -> int:
        """Steps that were done. Lightning logs the first one as number 0."""
        logged = max((step for step, row in self.curve.items() if "train/loss" in row), default=-1) + 1
        if self.result is not None:
            return int(number(self.result.get("steps")) or 0) or logged
        return max(logged, self.checkpoint_step)

    @property
    def steps_text(self) -> str:
        """Steps that were done, and of how many where the run is unfinished."""
        asked = number(self.config.get("max_steps"))
        more = f" of {asked:,.0f}" if asked else " so far"
        return f"{self.steps:,}{more if self.result is None else ''}"

    @property
    def tokens_per_step(self) -> int | None:
        """Of packed rows; None where rows differ in length."""
        data, trainer = self.config.get("data") or {}, self.config.get("trainer") or {}
        parts = [data.get("batch_size"), data.get("row_tokens"), trainer.get("accumulate_grad_batches", 1)]
        known = self.kind != "specdecpp" and all(number(part) for part in parts)
        return int(parts[0]) * int(parts[1]) * int(parts[2]) if known else None

    @property
    def tokens(self) -> int | None:
        told = number((self.result or {}).get("tokens"))
        if told is not None:
            return int(told)
        return self.steps * self.tokens_per_step if self.tokens_per_step else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """What validation said of the exported weights, or last."""
        if self.result is not None:
            return self.result.get("metrics") or self.result
        rows = self.curve.values()
        return {name: value for row in rows for name, value in row.items() if name.startswith("eval/")}

    @property
    def tau(self) -> Mapping[str, Mapping]:
        """Of its own drafter after training: "256 tokens, greedy" -> value, low, high."""
        return ((self.result or {}).get("tau") or {}).get(OWN_METHOD.get(self.kind, "")) or {}

    @property
    def contexts(self) -> int | None:
        """That each tau was measured on."""
        return int(number(((self.result or {}).get("settings") or {}).get("contexts")) or 0) or None


def groups(trainings: Iterable[Training]) -> list[list[Training]]:
    """Group trainings that can be compared, by name: those of one kind for one target."""
    found: dict[tuple[str, str], list[Training]] = {}
    for run in sorted(trainings, key=lambda run: natural(run.name)):
        found.setdefault((run.kind, run.begun.get("target_fingerprint") or run.target), []).append(run)
    return list(found.values())


def differences(runs: Sequence[Training]) -> dict[str, dict[str, object]]:
    """Find for each run the options in which it differs from most others; from all where no value is that of most.

    An option that some of them do not know, being older, does not count.
    """
    found: dict[str, dict[str, object]] = {run.name: {} for run in runs}
    for key in runs[0].options:
        if not all(key in run.options for run in runs):
            continue
        (usual, n), *others = Counter(repr(run.options[key]) for run in runs).most_common()
        for run in runs if others else ():
            if n <= len(runs) / 2 or repr(run.options[key]) != usual:
                found[run.name][key] = run.options[key]
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
    """A key that sorts k_2 before k_10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def flat(node: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Values by dotted key."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
