"""tau from what other commands wrote, for the throughput model: benchmarks, trainings, comparisons of drafters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spectrain.errors import UserError
from spectrain.measure.statistics import Estimate
from spectrain.measure.tau import POOLED, Setting
from spectrain.stores.folder import read_json
from spectrain.stores.yaml_files import read_yaml

STANDS_FOR = {"speculative": "vanilla"}  # method of a benchmark -> method of the throughput model


@dataclass(frozen=True)
class MeasuredTau:
    """tau of one method under one setting."""

    name: str  # of the method or drafter in the file
    method: str  # of the throughput model that it can stand for, or anything else
    tau: Estimate
    k: int | None  # drafted tokens per step; None where the file does not say
    setting: Setting


def read_tau(file: Path) -> list[MeasuredTau]:
    """Read what `results.json` of spectrain.bench, `result.json` of a training or `drafters.json` says about tau.

    Raises:
        UserError: the file is missing, damaged, or of another kind.
    """
    try:
        values = read_json(file)
    except OSError as error:
        raise UserError(f"results={file} cannot be read ({error.strerror}); give a file of results") from error
    except ValueError as error:
        raise UserError(f"results={file} is not JSON; give results.json, result.json or drafters.json") from error
    try:
        found = list(_entries(file, values)) if isinstance(values, dict) else []
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"results={file} is damaged ({type(error).__name__}: {error}); make it again") from error
    if not found:
        raise UserError(f"results={file} holds no tau; give results of a benchmark or training, or drafters.json")
    return found


def _entries(file: Path, values: Mapping) -> Iterator[MeasuredTau]:
    if values.get("kind") == "drafters":
        for name, one in values["drafters"].items():
            row = {label: tau for label, tau in one["tau"].items() if label.split(", ")[0] != POOLED}
            yield from _of_row(name, one.get("kind"), row, one.get("gamma", values.get("gamma")))
    elif "methods" in values:
        setting = Setting(None, (values.get("sampling") or {}).get("temperature"))
        for name, one in values["methods"].items():
            if one.get("mean_accepted") is not None and one.get("kind", "method") == "method":
                nodes = one.get("max_nodes")
                k = nodes - 1 if isinstance(nodes, int) else None  # a chain's nodes are the root and its drafts
                tau = Estimate(float(one["mean_accepted"]), *(one.get("mean_accepted_ci95") or ()))
                yield MeasuredTau(name, STANDS_FOR.get(name, name), tau, k, setting)
    elif "tau" in values:
        config = file.parent / "config.yaml"  # the training's
        k = read_yaml(config).get("k") if config.is_file() else None
        for name, row in values["tau"].items():
            yield from _of_row(name, name, row, k)


def _of_row(name: str, kind: str, row: Mapping[str, Mapping], k: int | None) -> Iterator[MeasuredTau]:
    """Read a mapping from names of settings to estimates."""
    for label, one in row.items():
        bounds = (math.nan if one.get(end) is None else float(one[end]) for end in ("low", "high"))
        tau = Estimate(float(one["value"]), *bounds)
        yield MeasuredTau(name, STANDS_FOR.get(kind, kind), tau, k, Setting.named(label))


def choose_tau(
    file: Path, found: Sequence[MeasuredTau], method: str, k: int, name: str | None = None, at: Setting | None = None
) -> MeasuredTau | None:
    """Choose the one tau that stands for a method of the throughput model; None where the file has none for it.

    Args:
        file: for messages.
        found: of `read_tau`.
        method: vanilla | magicdec | spire | spire_dense; the last is an ablation, so its drafter has to be named.
        k: drafted tokens per step in the model.
        name: in the file, of what stands for the method; None: whatever is of that method.
        at: the setting; what is None in it may be anything, if there is only one.

    Raises:
        UserError: the name is not there, several fit, or tau was measured with another k.
    """
    own = [one for one in found if (one.name == name if name else one.method == method != "spire_dense")]
    if not own and not name:
        return None
    names = list(dict.fromkeys(one.name for one in own or found))
    if not own:
        raise UserError(f"results_names.{method}={name} is not in {file}; it has {', '.join(names)}")
    if len(names) > 1:
        own = [one for one in own if one.name == method]
    if not own:
        raise UserError(f"several drafters could be {method}: give results_names.{method}= one of {', '.join(names)}")
    at = at or Setting(None, None)
    fitting = [one for one in own if at.context_tokens in (None, one.setting.context_tokens)]
    fitting = [one for one in fitting if at.temperature in (None, one.setting.temperature)]
    if len(fitting) != 1:
        settings = "; ".join(one.setting.name for one in own)
        raise UserError(
            f"results={file} has {len(fitting) or 'no'} tau of {method} that fit, of {settings}: give "
            "results_at.context_tokens= and results_at.temperature= (0: greedy)"
        )
    (chosen,) = fitting
    if chosen.k not in (None, k):
        measured = f"results={file} measured {chosen.name} with k={chosen.k}"
        raise UserError(f"{measured}, not k={k}, and tau depends on it; give k={chosen.k}, or other results")
    return chosen
