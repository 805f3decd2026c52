"""tau from what other commands wrote, for the throughput model: benchmarks, trainings, comparisons of drafters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spectrain.decoding.errors import UserError
from spectrain.measure.drafter_comparison import POOLED

METHOD_OF = {"speculative": "vanilla", "vanilla": "vanilla", "magicdec": "magicdec", "spire": "spire"}
CONDITION = re.compile(r"(\d+) tokens, (?:greedy|T=([\d.]+))")  # as of spectrain.measure.tau


@dataclass(frozen=True)
class MeasuredTau:
    """tokens a step of one method under one condition.

    Args:
        name: of the method or drafter in the file.
        method: of the throughput model that it stands for; None: nothing that the name tells.
        value, low, high: with its 95 % interval, None where there is none.
        k: drafted tokens a step; None where the file does not say.
        context_tokens, temperature: it was measured under; None where the file does not say.
    """

    name: str
    method: str | None
    value: float
    low: float | None = None
    high: float | None = None
    k: int | None = None
    context_tokens: int | None = None
    temperature: float | None = None

    @property
    def condition(self) -> str:
        context = "any context" if self.context_tokens is None else f"{self.context_tokens} tokens"
        sampling = (
            "" if self.temperature is None else f", {'greedy' if not self.temperature else f'T={self.temperature:g}'}"
        )
        return context + sampling


def read_tau(file: Path, k: int | None = None) -> list[MeasuredTau]:
    """Everything that a result file says about tau.

    Args:
        file: `results.json` of spectrain.bench, `result.json` of a training run, or `drafters.json`.
        k: of a training run, which its `result.json` does not say.

    Raises:
        UserError: it is missing, damaged, or of another kind.
    """
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"results={file} cannot be read ({error.strerror}); give a file of results") from error
    except ValueError as error:
        raise UserError(f"results={file} is no JSON; give results.json, result.json or drafters.json") from error
    try:
        if isinstance(values, dict) and values.get("kind") == "drafters":
            found = list(_of_comparison(values))
        elif isinstance(values, dict) and "methods" in values:
            found = list(_of_benchmark(values))
        elif isinstance(values, dict) and "tau" in values:
            found = list(_of_training(values["tau"], k))
        else:
            found = []
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"results={file} is damaged ({type(error).__name__}: {error}); make it again") from error
    if not found:
        raise UserError(
            f"results={file} holds no tau; give results.json of spectrain.bench, result.json of a spire or vanilla "
            "training, or drafters.json"
        )
    return found


def _of_benchmark(values: Mapping) -> Iterator[MeasuredTau]:
    """`mean_accepted` is tau: tokens after the first a target forward after prefill, the bonus included."""
    temperature = (values.get("sampling") or {}).get("temperature")
    for name, one in values["methods"].items():
        if one.get("mean_accepted") is None or one.get("kind", "method") != "method":
            continue
        nodes = one.get("max_nodes")
        k = nodes - 1 if isinstance(nodes, int) else None  # a chain's nodes are the root and its drafts
        low, high = one.get("mean_accepted_ci95") or (None, None)
        yield MeasuredTau(name, METHOD_OF.get(name), float(one["mean_accepted"]), low, high, k, temperature=temperature)


def _of_training(tau: Mapping, k: int | None) -> Iterator[MeasuredTau]:
    for name, row in tau.items():
        yield from _of_row(name, METHOD_OF.get(name), row, k)


def _of_comparison(values: Mapping) -> Iterator[MeasuredTau]:
    for name, one in values["drafters"].items():
        row = {setting: tau for setting, tau in one["tau"].items() if setting.split(", ")[0] != POOLED}  # of one length
        yield from _of_row(name, METHOD_OF.get(one.get("kind")), row, one.get("gamma", values.get("gamma")))


def _of_row(name: str, method: str | None, row: Mapping, k: int | None) -> Iterator[MeasuredTau]:
    """Of a mapping from "256 tokens, greedy" to an estimate."""
    for condition, estimate in row.items():
        parts = CONDITION.fullmatch(condition)
        if parts is None:
            raise ValueError(f"condition {condition!r}")
        value = float(estimate["value"])
        yield MeasuredTau(
            name,
            method,
            value,
            estimate.get("low"),
            estimate.get("high"),
            k,
            int(parts[1]),
            float(parts[2] or 0),
        )


def choose_tau(
    file: Path,
    found: Sequence[MeasuredTau],
    method: str,
    k: int,
    name: str | None = None,
    context_tokens: int | None = None,
    temperature: float | None = None,
) -> MeasuredTau | None:
    """The one tau that stands for a method of the throughput model; None where the file has none for it.

    Args:
        file: for messages.
        found: of `read_tau`.
        method: vanilla | magicdec | spire | spire_dense
        k: drafted tokens a step that the model reckons with.
        name: in the file, of what stands for the method; None: what its kind says.
        context_tokens, temperature: the condition; None: the only one there is.

    Raises:
        UserError: the name is not there, several fit, or it was measured with another k.
    """
    own = [one for one in found if (one.name == name if name else one.method == method)]
    if not own:
        if name:
            names = ", ".join(dict.fromkeys(one.name for one in found))
            raise UserError(f"results_names.{method}={name} is not in {file}; it has {names}")
        return None
    names = list(dict.fromkeys(one.name for one in own))
    if len(names) > 1:
        own = [one for one in own if one.name == method]
        if not own:
            raise UserError(
                f"results={file} has {len(names)} drafters that could be {method}: give results_names.{method}= one of "
                f"{', '.join(names)}"
            )
    fitting = [
        one for one in own if context_tokens in (None, one.context_tokens) and temperature in (None, one.temperature)
    ]
    if len(fitting) != 1:
        conditions = "; ".join(one.condition for one in own)
        raise UserError(
            f"results={file} has {len(fitting) or 'no'} tau of {method} that fit, of {conditions}: give "
            "results_at.context_tokens= and results_at.temperature= (0: greedy)"
        )
    chosen = fitting[0]
    if chosen.k is not None and chosen.k != k:
        raise UserError(
            f"results={file} measured {chosen.name} with k={chosen.k}, not k={k}, and tau depends on it; give "
            f"k={chosen.k}, or other results"
        )
    if not math.isfinite(chosen.value):
        raise UserError(f"results={file} has tau={chosen.value} for {chosen.name}; measure it again")
    return chosen
