"""What `spectrain.cost` reckons with, read from its config: shapes, hardware, methods and their tau."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spectrain.decoding.errors import UserError, check_whole
from spectrain.measure.cost import Hardware, Method, Shape, SparseBudget
from spectrain.measure.machine_speed import measure_cpu
from spectrain.measure.measured_tau import MeasuredTau, choose_tau, read_tau
from spectrain.measure.model_shape import SpireShape, is_spire, shape_of_model, shape_of_numbers, spire_shape
from spectrain.methods.registry import names
from spectrain.stores.locations import bundled_folder, conf_dir

log = logging.getLogger(__name__)

BUNDLED = "pystdlib-8l"
METHODS = ("vanilla", "magicdec", "spire", "spire_dense")
ALL = METHODS[:3]
VIEWS = ("multiplier", "times", "curves", "break_even", "analysis", "intensity", "roofline")
SECTIONS = ("numbers", "tau", "published", "results_at", "results_names", "spot", "investment", "roofline")
BYTES_A_VALUE = {"fp8": 1, "int8": 1, "fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4}


@dataclass(frozen=True)
class Shapes:
    """Of the models, and where each is from."""

    target: Shape
    vanilla: Shape
    spire: Shape
    sources: dict[str, str]  # target, vanilla, spire -> a few words
    exported: SpireShape | None  # the SPIRe drafter that was given as a folder


@dataclass(frozen=True)
class Grid:
    """Which cells are computed."""

    batch: tuple[int, ...]
    context_tokens: tuple[int, ...]
    spot: tuple[int, int]  # batch and context of the cost analysis
    views: tuple[str, ...]


def check_sections(cfg: DictConfig) -> None:
    """Raises UserError where one value stands in place of several options."""
    for name in SECTIONS:
        if not OmegaConf.is_dict(cfg[name]):
            raise UserError(f"{name}={cfg[name]} must stay a group of options; give one of them, as {name}.<option>=")


def read_grid(cfg: DictConfig) -> Grid:
    """Raises UserError where a batch size or context length is no positive whole number, or a view is unknown."""
    axes = {}
    for name in ("batch", "context_tokens"):
        values = list(cfg[name]) if OmegaConf.is_list(cfg[name]) else [cfg[name]]
        if not values:
            raise UserError(f"{name}=[] names no value; give some, as {name}=[1,64]")
        for value in values:
            check_whole(name, value, 1)
        axes[name] = tuple(sorted(set(values)))
        check_whole(f"spot.{name}", cfg.spot[name], 1)
    views = tuple(names(cfg.views))
    unknown = [view for view in views if view not in VIEWS]
    if unknown or not views:
        raise UserError(f"views={unknown[0] if unknown else '[]'} is unknown; choose among {', '.join(VIEWS)}")
    return Grid(axes["batch"], axes["context_tokens"], (cfg.spot.batch, cfg.spot.context_tokens), views)


def read_shapes(cfg: DictConfig) -> Shapes:
    """The target's shape and those of drafters: from folders, numbers, or as the paper shapes them.

    Raises:
        UserError: a folder or number is wrong, or a model is given twice.
    """
    numbers = cfg.numbers
    sources = {}
    if cfg.target.path is not None and numbers.target is not None:
        raise UserError(f"target={cfg.target.path} and numbers.target are both given; give numbers.target=null")
    if numbers.target is not None:
        target, sources["target"] = shape_of_numbers("numbers.target", numbers.target), "given by numbers"
    else:
        path = str(cfg.target.path or BUNDLED)
        target, sources["target"] = shape_of_model(str(bundled_folder(path) or path), "target"), path
    vanilla, exported = None, None
    for path in names(cfg.drafter):
        kind = "spire" if is_spire(Path(path)) else "vanilla"
        if kind in sources or numbers[kind] is not None:
            also = "another drafter" if kind in sources else f"numbers.{kind}"
            raise UserError(f"drafter={path} is a {kind} drafter, and so is {also}; give one of them")
        sources[kind] = path
        if kind == "spire":
            exported = spire_shape(Path(path))
        else:
            vanilla = shape_of_model(str(bundled_folder(path) or path), "drafter")
    if vanilla is None:
        vanilla, sources["vanilla"] = _vanilla(numbers.vanilla, target)
    if exported is not None:
        return Shapes(target, vanilla, exported.shape, sources, exported)
    n_layer = max(1, target.n_layer // 4)
    given = numbers.spire if numbers.spire is not None else {"n_layer": n_layer}
    sources["spire"] = "given by numbers" if numbers.spire is not None else f"{n_layer} of the target's blocks"
    return Shapes(target, vanilla, shape_of_numbers("numbers.spire", given, target), sources, None)


def _vanilla(given: Mapping | None, target: Shape) -> tuple[Shape, str]:
    """By numbers, or as `+exp=vanilla` makes it: half the layers, half the width in as many heads (1/8 of the body)."""
    if given is not None:
        return shape_of_numbers("numbers.vanilla", given), "given by numbers"
    half = Shape(
        n_layer=max(1, target.n_layer // 2),
        hidden_size=max(1, target.hidden_size // 2),
        n_head=target.n_head,
        n_kv_head=target.n_kv_head,
        head_dim=max(1, target.head_dim // 2),
        intermediate_size=max(1, target.intermediate_size // 2),
        vocab_size=target.vocab_size,
    )
    return half, "half the target's layers and width"


def read_hardware(cfg: DictConfig) -> Hardware:
    """The hardware; `hardware=cpu` is measured here.

    Raises:
        UserError: it has no peak for this dtype, or a number is out of range.
    """
    known = sorted(path.stem for path in (conf_dir() / "hardware").glob("*.yaml"))
    node = cfg.get("hardware")
    if not OmegaConf.is_dict(node):
        name = HydraConfig.get().runtime.choices.get("hardware") if HydraConfig.initialized() else node
        raise UserError(f"hardware={name} is unknown; choose among {', '.join(known)}")
    given = cfg.operational_intensity
    dtype = cfg.dtype if cfg.dtype is not None else node.get("dtype")
    if dtype is not None and dtype not in BYTES_A_VALUE:
        raise UserError(f"dtype={dtype} is unknown; choose among {', '.join(BYTES_A_VALUE)}")
    default = node.get("bytes_a_value") if cfg.dtype is None else None
    a_value = next(v for v in (cfg.bytes_a_value, default, BYTES_A_VALUE.get(dtype), 1) if v is not None)
    sizes = {name: cfg[name] if cfg[name] is not None else a_value for name in ("weight_bytes", "kv_bytes")}
    if given is not None or node.get("operational_intensity") is not None:
        name = f"{given} FLOPs a byte" if given is not None else node.name
        source = "given" if given is not None else node.source
        return Hardware(name, given if given is not None else node.operational_intensity, **sizes, source=source)
    if node.flops_per_s is None or node.bytes_per_s is None:
        return _measured(dtype, sizes)
    if dtype not in node.flops_per_s:
        known = ", ".join(node.flops_per_s)
        raise UserError(f"hardware={node.name} has no peak for dtype={dtype}; choose among {known}")
    peaks = {"flops_per_s": node.flops_per_s[dtype], "bytes_per_s": node.bytes_per_s}
    for key, value in peaks.items():
        if not isinstance(value, int | float) or not value > 0:
            raise UserError(f"hardware.{key}={value} must be a number above 0, as 3.35e12")
    intensity = peaks["flops_per_s"] / peaks["bytes_per_s"]
    return Hardware(node.name, intensity, **sizes, **peaks, dtype=dtype, source=node.source)


def _measured(dtype: str, sizes: dict[str, float]) -> Hardware:
    """This machine's CPU."""
    speed = measure_cpu(dtype)
    name = f"this CPU ({speed.name}, {speed.threads} thread{'s' if speed.threads > 1 else ''})"
    return Hardware(
        name,
        speed.flops_per_s / speed.bytes_per_s,
        **sizes,
        flops_per_s=speed.flops_per_s,
        bytes_per_s=speed.bytes_per_s,
        dtype=dtype,
        source="measured by this command",
    )


def read_budget(cfg: DictConfig, exported: SpireShape | None, longest: int) -> SparseBudget:
    """The sparse cache of magicdec and spire.

    Raises:
        UserError: the window is longer than every context.
    """
    window = cfg.window_tokens
    sink = cfg.sink_tokens
    if window == "auto":
        window = exported.window_tokens if exported is not None else "share"
        sink = exported.sink_tokens if exported is not None else sink
    if window == "share":
        return SparseBudget(sink, None, cfg.window_share)
    check_whole("window_tokens", window, 1)
    if window > longest:
        raise UserError(
            f"window_tokens={window} is longer than the longest context of {longest} tokens, so nothing is sparse; "
            "lower it, or give longer context_tokens"
        )
    return SparseBudget(sink, window)


def read_methods(cfg: DictConfig, shapes: Shapes, longest: int) -> tuple[tuple[Method, ...], dict[str, dict]]:
    """The methods with their tau, and of each where its tau is from.

    Raises:
        UserError: a method is unknown, its tau is missing or out of range, or was measured with another k.
    """
    wanted = ALL if "all" in names(cfg.methods) else tuple(names(cfg.methods))
    unknown = [name for name in wanted if name not in METHODS]
    if unknown or not wanted:
        raise UserError(
            f"methods={unknown[0] if unknown else '[]'} is unknown; choose among {', '.join(METHODS)}, or all"
        )
    budget = read_budget(cfg, shapes.exported, longest)
    feedback = shapes.exported.feedback if shapes.exported is not None else True
    parts = {
        "vanilla": (shapes.vanilla, None, False),
        "magicdec": (shapes.target, budget, False),
        "spire": (shapes.spire, budget, feedback),
        "spire_dense": (shapes.spire, None, feedback),
    }
    found = read_tau(Path(str(cfg.results)), k_of_run(Path(str(cfg.results)))) if cfg.results is not None else None
    methods, sources = [], {}
    for name in wanted:
        k = _k_of(cfg.k, name)
        chosen = _tau_of(cfg, found, name, k)
        if chosen is None:
            if "all" not in names(cfg.methods):
                raise UserError(
                    f"results={cfg.results} has no tau of {name}; give results_names.{name}= or tau.{name}="
                )
            log.warning("%s is left out: %s has no tau of it", name, cfg.results)
            continue
        shape, own_budget, own_feedback = parts[name]
        methods.append(Method(name, shape, k, chosen[0], own_budget, own_feedback))
        sources[name] = chosen[1]
    if not methods:
        raise UserError(
            f"results={cfg.results} has no tau of {', '.join(wanted)}; give results_names.<method>= or tau.<method>="
        )
    return tuple(methods), sources


def _k_of(k: object, method: str) -> int:
    """Of one number for all, or a mapping."""
    if OmegaConf.is_dict(k):
        unknown = [name for name in k if name not in METHODS]
        if unknown or method not in k:
            what = f"k.{unknown[0]} is unknown" if unknown else f"k has no {method}"
            raise UserError(f"{what}; give one number, or one for each of {', '.join(METHODS)}")
        k = k[method]
    check_whole("k", k, 1)
    return k


def _tau_of(cfg: DictConfig, found: list[MeasuredTau] | None, name: str, k: int) -> tuple[float, dict] | None:
    """tau and what is known of it; None where `results` has none."""
    if cfg.tau.get(name) is not None:
        return cfg.tau[name], {"source": "given"}
    if found is None:
        if k != cfg.published.k:
            raise UserError(
                f"k={k}: the published tau of {name} is of k={cfg.published.k}, and tau depends on it; give "
                f"tau.{name}= or results="
            )
        return cfg.published[name], {"source": "published (SPIRe, Table 1)"}
    at = cfg.results_at
    chosen = choose_tau(
        Path(str(cfg.results)), found, name, k, cfg.results_names.get(name), at.context_tokens, at.temperature
    )
    if chosen is None:
        return None
    if chosen.k is None:
        log.warning("%s does not say with which k tau of %s was measured; k=%d is taken", cfg.results, name, k)
    return chosen.value, {
        "source": f"measured: {chosen.name}, {chosen.condition}",
        "low": chosen.low,
        "high": chosen.high,
    }


def k_of_run(results: Path) -> int | None:
    """Drafted tokens of a training run, from the config beside its `result.json`."""
    file = results.parent / "config.yaml"
    if results.name != "result.json" or not file.is_file():
        return None
    return OmegaConf.load(file).get("k")
