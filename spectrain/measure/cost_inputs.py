"""What `spectrain.cost` computes with, read from its options: the axes, and the methods with their tau.

`options` is the resolved content of conf/cost.yaml as plain values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from spectrain.errors import UserError, check_whole
from spectrain.measure.cost import Method, SparseBudget
from spectrain.measure.measured_tau import MeasuredTau, choose_tau, read_tau
from spectrain.measure.model_shape import Shapes
from spectrain.measure.tau import POOLED, Setting
from spectrain.methods.registry import names
from spectrain.models.spire import SpireConfig

log = logging.getLogger(__name__)

METHODS = ("vanilla", "magicdec", "spire", "spire_dense")
ALL = METHODS[:3]
VIEWS = ("multiplier", "times", "curves", "break_even", "analysis", "intensity", "roofline")


def check_options(options: Mapping) -> None:
    """Raise UserError where an option names what is unknown."""
    if isinstance(options["k"], Mapping):
        check_names("k", list(options["k"]), METHODS)
    check_names("views", names(options["views"]), VIEWS)
    check_names("methods", names(options["methods"]), (*METHODS, "all"))


def axis(options: Mapping, name: str) -> list[int]:
    """Return the batch sizes or context lengths, rising."""
    return sorted(set(options[name])) if isinstance(options[name], list) else [options[name]]


def check_names(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given or ["[]"]:
        if name not in known:
            raise UserError(f"{option}={name} is unknown; choose among {', '.join(known)}")


def read_budget(options: Mapping, exported: SpireConfig | None) -> SparseBudget:
    """Read the sparse cache of magicdec and spire. Raises UserError if its window is longer than every context."""
    window, sink = options["window_tokens"], options["sink_tokens"]
    if window == "auto" and exported is not None:
        window, sink = exported.window_tokens, exported.sink_tokens
    if window in ("auto", "share"):
        return SparseBudget(sink, None, options["window_share"])
    longest = max(*axis(options, "context_tokens"), options["spot"]["context_tokens"])
    if window > longest:
        raise UserError(f"window_tokens={window} is longer than the longest context of {longest} tokens; lower it")
    return SparseBudget(sink, window)


def read_methods(options: Mapping, shapes: Shapes) -> tuple[list[Method], dict[str, dict]]:
    """Read the methods with their tau, and where the tau of each is from.

    Raises:
        UserError: tau is missing or out of range, or was measured with another k; the unembedding is to be counted,
            but a vocabulary is unknown.
    """
    budget = read_budget(options, shapes.exported)
    feedback = shapes.exported.feedback if shapes.exported is not None else True
    parts = {
        "vanilla": (shapes.vanilla, None, False),
        "magicdec": (shapes.target, budget, False),
        "spire": (shapes.spire, budget, feedback),
        "spire_dense": (shapes.spire, None, feedback),
    }
    measured = read_tau(Path(str(options["results"]))) if options["results"] is not None else None
    chosen, methods, sources = names(options["methods"]), [], {}
    for name in ALL if "all" in chosen else chosen:
        k = options["k"].get(name) if isinstance(options["k"], Mapping) else options["k"]
        check_whole(f"k of {name}", k, 1)
        tau, source = _tau_of(options, measured, name, k)
        if tau is not None:
            shape, *cache = parts[name]
            methods.append(Method(name, shape, k, tau, *cache))
            sources[name] = source
        elif "all" in chosen:
            log.warning("%s is left out: %s has no tau of it", name, options["results"])
        else:
            raise UserError(f"{options['results']} has no tau of {name}; give results_names.{name}= or tau.{name}=")
    if not methods:
        raise UserError(f"results={options['results']} has no tau of any method; give results_names.<method>=")
    for name, shape in ({"target": shapes.target} | {method.name: method.shape for method in methods}).items():
        if options["count_unembedding"] and not shape.vocab_size:
            raise UserError(f"count_unembedding=true needs the vocabulary of {name}; give numbers.{name} a vocab_size")
    return methods, sources


def _tau_of(
    options: Mapping, measured: Sequence[MeasuredTau] | None, name: str, k: int
) -> tuple[float | None, dict[str, str | float | None]]:
    """Read tau and its source; None where `results` has none."""
    if options["tau"].get(name) is not None:
        return options["tau"][name], {"source": "given"}
    if measured is None:
        if k != options["published"]["k"]:
            known = f"the published tau of {name} is of k={options['published']['k']}"
            raise UserError(f"k={k}: {known}, and tau depends on it; give tau.{name}= or results=")
        return options["published"][name], {"source": "published (SPIRe, Table 1)"}
    file = Path(str(options["results"]))
    chosen = choose_tau(file, measured, name, k, options["results_names"].get(name), Setting(**options["results_at"]))
    if chosen is None:
        return None, {}
    if chosen.k is None:
        log.warning("%s does not say with which k tau of %s was measured; k=%d is assumed", file, name, k)
    setting = chosen.setting.name.replace(POOLED, "any context", 1)  # benchmarks do not say how long contexts were
    source = {"source": f"measured: {chosen.name}, {setting}"} | chosen.tau.as_json()
    return source.pop("value"), source
