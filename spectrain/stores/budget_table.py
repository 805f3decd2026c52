"""Measurements that node budgets are chosen by, at rest: a JSON file for each target and machine.

    checkpoints/budget-<target's fingerprint>-<hash of device, dtype and threads>.json

Seconds of another device, dtype or thread count say nothing, so such a file is refused with a sentence that names both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from spectrain.decoding import Sampling, TargetModel, fingerprint
from spectrain.decoding.budget import ForwardCost, MethodCurve, NodeBudget
from spectrain.decoding.errors import UserError

log = logging.getLogger(__name__)

SCHEMA = 1
COMMAND = "python -m spectrain.tune budget=true"
NO_OPTIONS = ("max_nodes", "datastore")  # what the curve is over, and where a file lies


def machine_of(target: TargetModel) -> dict:
    """What seconds depend on: device, dtype, threads."""
    device = target.device
    if device.type == "cuda":
        n_devices = len({p.device for p in target.model.parameters()})
        name, threads = f"{n_devices} x {torch.cuda.get_device_name(device)}", None
    else:
        name, threads = f"{_processor()} ({device.type})", torch.get_num_threads()
    return {"device": name, "dtype": str(target.dtype).removeprefix("torch."), "threads": threads}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


@dataclass(frozen=True)
class CurveEntry:
    """A curve and what it was measured of."""

    name: str  # of the method or variant
    options: dict  # its yaml, `_target_` included, without max_nodes
    sampling: dict
    curve: MethodCurve

    def key(self) -> str:
        return json.dumps([self.name, self.options, self.sampling], sort_keys=True)


@dataclass(frozen=True)
class BudgetTable:
    """All that was measured of one target on one machine."""

    target_fingerprint: str
    machine: dict
    cost: ForwardCost
    entries: tuple[CurveEntry, ...] = ()
    facts: dict = field(default_factory=dict)  # target, date, prompts: for the reader

    @property
    def file_name(self) -> str:
        return file_name(self.target_fingerprint, self.machine)

    def save(self, folder: Path) -> Path:
        """Writes the file, by renaming. Curves of other methods and samplings that stand there already are kept."""
        file = folder / self.file_name
        measured = {entry.key(): entry for entry in self.entries}
        before = BudgetTable.load(file).entries if file.is_file() else ()
        entries = [*(entry for entry in before if entry.key() not in measured), *self.entries]
        values = {
            "kind": "budget",
            "schema": SCHEMA,
            "target_fingerprint": self.target_fingerprint,
            "machine": self.machine,
            "facts": self.facts,
            "cost": self.cost.as_json(),
            "curves": [asdict(entry) for entry in entries],
        }
        folder.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(values, indent=1) + "\n")
        temporary.rename(file)
        return file

    @classmethod
    def load(cls, file: Path) -> BudgetTable:
        """Raises UserError where the file is no table of this version."""
        try:
            values = json.loads(file.read_text())
            if values["kind"] != "budget" or values["schema"] != SCHEMA:
                raise ValueError(f"schema {values['schema']}")
            entries = tuple(
                CurveEntry(**{**entry, "curve": MethodCurve.from_json(entry["curve"])}) for entry in values["curves"]
            )
            cost = ForwardCost.from_json(values["cost"])
            return cls(values["target_fingerprint"], values["machine"], cost, entries, values["facts"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{file} holds no budget table of schema {SCHEMA} ({error}); remove it and run {COMMAND}"
            ) from error

    def budget(self, options: Mapping, sampling: Sampling) -> NodeBudget:
        """The budget of a method, from its curve under this sampling.

        Args:
            options: the method's yaml, resolved.
            sampling: of the decoding to come.

        Raises:
            UserError: the method was not measured, or not under this sampling.
        """
        method = options["_target_"].split(".")[-2]
        own = [entry for entry in self.entries if entry.options["_target_"] == options["_target_"]]
        fitting = [entry for entry in own if entry.sampling == asdict(sampling)]
        if not fitting:
            wanted = sampling_name(asdict(sampling))
            known = sorted({sampling_name(entry.sampling) for entry in own})
            under = f"under {wanted}, only under {'; '.join(known)}" if known else "on this machine"
            raise UserError(
                f"max_nodes=auto: {method} was not measured {under}; run {COMMAND} methods=[{method}] "
                "with this target and sampling"
            )
        differing = {id(entry): _differing(entry.options, options) for entry in fitting}
        best = min(fitting, key=lambda entry: len(differing[id(entry)]))
        if differing[id(best)]:
            log.warning(
                "max_nodes=auto: %s was measured with other %s; tune it as a variant for its own budget",
                *(best.name, ", ".join(differing[id(best)])),
            )
        return NodeBudget(cost=self.cost, curve=best.curve)


def file_name(target_fingerprint: str, machine: dict) -> str:
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:8]
    return f"budget-{target_fingerprint}-{digest}.json"


def find_table(folder: Path, target: TargetModel) -> BudgetTable:
    """The table of this target on this machine.

    Raises:
        UserError: there is none; says what the ones that are there were measured on.
    """
    prints, machine = fingerprint(target.model, target.tokenizer), machine_of(target)
    file = folder / file_name(prints, machine)
    if file.is_file():
        return BudgetTable.load(file)
    others = [BudgetTable.load(other).machine for other in sorted(folder.glob(f"budget-{prints}-*.json"))]
    if others:
        differing = (key for key in machine if machine[key] != others[0].get(key))
        name = next(differing, "device")
        here, there = machine[name], others[0].get(name)
        why = f"{folder} holds measurements of this target with {name} {there}, not {here}"
    else:
        targets = sorted({other.name.split("-")[1] for other in folder.glob("budget-*.json")})
        held = f", only of {', '.join(targets)}" if targets else ""
        why = f"{folder} holds no measurements of target {prints}{held}"
    raise UserError(f"max_nodes=auto: {why}; run {COMMAND} with this target, device and number of threads")


def _differing(measured: Mapping, options: Mapping) -> list[str]:
    return [
        key
        for key in sorted(measured.keys() | options.keys())
        if key not in NO_OPTIONS and measured.get(key) != options.get(key)
    ]


def sampling_name(sampling: dict) -> str:
    if not sampling["temperature"]:
        return "greedy"
    return ", ".join(f"{name} {value}" for name, value in sampling.items() if value != getattr(Sampling(), name))
