"""The measurements that max_nodes=auto goes by: one JSON file per target and machine.

    checkpoints/budget-<fingerprint of the target>-<hash of device, dtype and threads>.json

Seconds measured with another device, dtype or thread count say nothing, so such a file is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from spectrain.decoding import Sampling, TargetModel, fingerprint
from spectrain.decoding.budget import ForwardCost, MethodCurve, NodeBudget
from spectrain.decoding.errors import UserError
from spectrain.stores.environment import cpu_name
from spectrain.stores.folder import digest, read_json, write_json

log = logging.getLogger(__name__)

SCHEMA = 1
COMMAND = "python -m spectrain.tune budget=true"
NO_OPTIONS = ("max_nodes", "datastore")  # the curve's own axis, and the place of a file


def machine_of(target: TargetModel) -> dict:
    """The device, dtype and number of threads, on which seconds depend."""
    device = target.device
    if device.type == "cuda":
        n_devices = len({p.device for p in target.model.parameters()})
        name, threads = f"{n_devices} x {torch.cuda.get_device_name(device)}", None
    else:
        name, threads = f"{cpu_name()} ({device.type})", torch.get_num_threads()
    return {"device": name, "dtype": str(target.dtype).removeprefix("torch."), "threads": threads}


@dataclass(frozen=True)
class CurveEntry:
    """The curve of one method or variant under one sampling."""

    name: str  # of the method or variant
    options: dict  # its yaml, `_target_` included, without max_nodes
    sampling: Sampling
    curve: MethodCurve


@dataclass(frozen=True)
class BudgetTable:
    """All that was measured of one target on one machine."""

    target_fingerprint: str
    machine: dict
    cost: ForwardCost
    entries: tuple[CurveEntry, ...] = ()
    facts: dict = field(default_factory=dict)  # target, date, prompts: for the reader

    def save(self, folder: Path) -> Path:
        """Write the file whole. Curves of other methods and samplings that it holds already are kept."""
        file = folder / file_name(self.target_fingerprint, self.machine)
        before = BudgetTable.load(file).entries if file.is_file() else ()
        measured = [(entry.name, entry.options, entry.sampling) for entry in self.entries]
        kept = [entry for entry in before if (entry.name, entry.options, entry.sampling) not in measured]
        values = {
            "kind": "budget",
            "schema": SCHEMA,
            "target_fingerprint": self.target_fingerprint,
            "machine": self.machine,
            "facts": self.facts,
            "cost": asdict(self.cost),
            "curves": [asdict(entry) for entry in (*kept, *self.entries)],
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, values)
        return file

    @classmethod
    def load(cls, file: Path) -> BudgetTable:
        """Read a file. Raises UserError where it is not a table of this version."""
        try:
            values = read_json(file)
            if values["kind"] != "budget" or values["schema"] != SCHEMA:
                raise ValueError(f"schema {values['schema']}")
            entries = tuple(
                CurveEntry(
                    one["name"], one["options"], Sampling(**one["sampling"]), MethodCurve.from_json(one["curve"])
                )
                for one in values["curves"]
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
        fitting = [entry for entry in own if entry.sampling == sampling]
        if not fitting:
            known = "; ".join(sorted({entry.sampling.describe() for entry in own}))
            under = f"under {sampling.describe()}, only under {known}" if known else "on this machine"
            raise UserError(
                f"max_nodes=auto: {method} was not measured {under}; run {COMMAND} methods=[{method}] "
                "with this target and sampling"
            )
        differing = [_differing(entry.options, options) for entry in fitting]
        best = min(range(len(fitting)), key=lambda i: len(differing[i]))
        if differing[best]:
            log.warning(
                "max_nodes=auto: %s was measured with other %s; tune it as a variant for its own budget",
                *(fitting[best].name, ", ".join(differing[best])),
            )
        return NodeBudget(cost=self.cost, curve=fitting[best].curve)


def _differing(measured: Mapping, options: Mapping) -> list[str]:
    keys = sorted((measured.keys() | options.keys()) - set(NO_OPTIONS))
    return [key for key in keys if measured.get(key) != options.get(key)]


def file_name(target_fingerprint: str, machine: dict) -> str:
    return f"budget-{target_fingerprint}-{digest(machine)}.json"


def find_table(folder: Path, target: TargetModel) -> BudgetTable:
    """The table of this target on this machine.

    Raises:
        UserError: there is none; the sentence says what the tables in the folder were measured on.
    """
    prints, machine = fingerprint(target.model, target.tokenizer), machine_of(target)
    file = folder / file_name(prints, machine)
    if file.is_file():
        return BudgetTable.load(file)
    others = [BudgetTable.load(other).machine for other in sorted(folder.glob(f"budget-{prints}-*.json"))]
    if others:
        name = next((key for key in machine if machine[key] != others[0].get(key)), "device")
        why = f"{folder} holds measurements of this target with {name} {others[0].get(name)}, not {machine[name]}"
    else:
        targets = sorted({other.name.split("-")[1] for other in folder.glob("budget-*.json")})
        held = f", only of {', '.join(targets)}" if targets else ""
        why = f"{folder} holds no measurements of target {prints}{held}"
    raise UserError(f"max_nodes=auto: {why}; run {COMMAND} with this target, device and number of threads")
