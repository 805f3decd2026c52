"""The results of the throughput model as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from pandas import DataFrame

from spectrain.measure.cost_analysis import AUTOREGRESSIVE, CostGrid, Span
from spectrain.reporting.formats import compact
from spectrain.reporting.tables import table_of

Titled = tuple[str, DataFrame]


def cost_tables(grid: CostGrid, views: Sequence[str], results: Mapping, roofline_batch: int) -> Iterator[Titled]:
    """Make the tables that the views ask for, with their titles.

    `results` is the content of cost.json; `roofline_batch` are the rows for SSSD's s_q.
    """
    yield models_table(grid, results, compares=bool(set(views) - {"intensity", "roofline"}))
    if "multiplier" in views:
        for one in results["tables"]:
            title = f"{one['method']} (tau = {one['tau']:.3f}): throughput relative to autoregressive decoding"
            yield title, by_context(grid, "batch", grid.batch, one["multiplier"], "{:.2f}x")
    if "times" in views and grid.model.hardware.flops_per_s is not None:
        yield times_table(grid)
    if "break_even" in views:
        low, high = grid.context_tokens[0], grid.context_tokens[-1]
        rows = {batch: {"batch": str(batch)} for batch in grid.batch}
        for one in results["break_even"]:
            rows[one["batch"]][one["faster"]] = spans_text(one["context_tokens"], low, high)
        yield (
            f"context lengths of {low:,} to {high:,} tokens where one is faster than the other",
            table_of(rows.values()),
        )
    if "analysis" in views:
        found = results["analysis"]["methods"]
        title = f"cost analysis at batch {grid.spot[0]}, context {grid.spot[1]:,}, in units of the target's training; "
        yield f"{title}plain decoding would cost {found[0]['decoding']:g}", table_of(map(investment_row, found))
    if "intensity" in views:
        yield intensity_table(grid)
    if "roofline" in views:
        yield from roofline_tables(grid, results["roofline"], roofline_batch)


def by_context(grid: CostGrid, corner: str, heads: Iterable, cells: Sequence[Sequence], form: str) -> DataFrame:
    """Write numbers by context length, one row per head."""
    frame = DataFrame(np.asarray(cells), columns=[*map(compact, grid.context_tokens)]).map(form.format)
    frame.insert(0, corner, [*map(str, heads)])
    return frame


def spans_text(spans: Sequence[Span], low: int, high: int) -> str:
    """Runs of context lengths in words; low and high are the ends of what was looked at."""
    words = []
    for first, last in spans:
        start, end = f"from {first:,}" if first > low else "", f"to {last:,}" if last < high else ""
        words.append(f"{first:,} {end}" if start and end else start or end or "all")
    return ", ".join(words) or "none"


def models_table(grid: CostGrid, results: Mapping, compares: bool) -> Titled:
    """What is compared, on which hardware; the target alone where no view compares."""
    model, hardware, sources = grid.model, grid.model.hardware, results["sources"] | {"magicdec": "the target"}
    shapes = {"target": model.target} | {method.name: method.shape for method in grid.methods if compares}
    rows = {
        name: {
            "model: layers x width": f"{name}: {shape.n_layer} x {shape.hidden_size}, "
            + sources[name.removesuffix("_dense")],
            "parameters": f"{model.parameters(shape):,}",
            "KV": f"{shape.kv_values * hardware.kv_bytes:,.0f}",
        }
        for name, shape in shapes.items()
    }
    for one in results["tables"] if compares else ():
        known = one["tau_is"]
        interval = "" if known.get("low") is None else f" [{known['low']:.3f}, {known['high']:.3f}]"
        rows[one["method"]] |= {
            "cache": one["cache"] or "L",
            "k": str(one["k"]),
            "tau": f"{one['tau']:.3f}{interval}",
            "tau is": known["source"],
        }
    title = (
        f"{hardware.name}: {hardware.operational_intensity:.0f} FLOPs per byte"
        + (f" in {hardware.dtype}" if hardware.dtype else "")
        + f"; {hardware.weight_bytes:g} bytes per weight, {hardware.kv_bytes:g} per KV value\nparameters: "
        + f"{'with' if model.count_unembedding else 'without'} the unembedding; KV: bytes per token; cache: tokens "
        "that a draft reads of a context of L; tau: tokens per step, the target's own included"
    )
    return title, table_of(rows.values())


def times_table(grid: CostGrid) -> Titled:
    """Milliseconds of a step at the spot's batch size, one row per context length."""
    hardware, batch = grid.model.hardware, grid.spot[0]
    rows = [{"context": compact(context)} for context in grid.context_tokens]
    for method in grid.methods:
        step = grid.model.step(method, [batch], grid.context_tokens)
        costs = (hardware.milliseconds(cost)[0] for cost in (step.draft, step.verify, step.step, step.target))
        for row, draft, verify, whole, target in zip(rows, *costs, strict=True):
            row.setdefault(AUTOREGRESSIVE, f"{target:.3g}\n{1e3 * batch / target:,.0f}/s")
            rate = 1e3 * batch * method.tau / whole
            row[method.name] = f"{whole:.3g} ({method.k} x {draft:.3g} + {verify:.3g})\n{rate:,.0f}/s"
    title = f"{hardware.name}, batch {batch}: ms per step if both peaks are reached (k drafts + verify)"
    return f"{title}, tokens/s of all rows", table_of(rows)


def investment_row(one: Mapping) -> dict[str, str]:
    """SPIRe section 5: what training costs against what decoding saves."""
    return {
        "method": one["method"],
        "multiplier": f"{one['multiplier']:.2f}x",
        "training": f"{one['training']:.3f}",
        "decoding saved": f"{one['saved']:.2f}",
        "saved in all": f"{one['net']:.2f}",
        "pays from decoding of": "never" if math.isinf(pays := one["break_even_decoding"]) else f"{pays:.2f}",
    }


def intensity_table(grid: CostGrid) -> Titled:
    """Figure 3: FLOPs per byte of verifying k tokens per row, and from which batch size that is compute-bound."""
    model, contexts, k = grid.model, grid.context_tokens, grid.methods[0].k
    cells = [*model.intensity(grid.batch, contexts, k), model.intensity_limit(contexts, k)]
    frame = by_context(grid, "batch x k", [*(f"{batch * k:,}" for batch in grid.batch), "any: below"], cells, "{:,.0f}")
    critical = ["never" if math.isinf(b) else f"{math.ceil(b):,}" for b in model.critical_batch(contexts, k)]
    frame.loc[len(frame)] = ["compute-bound from batch", *critical]
    title = (
        f"FLOPs per byte of verifying k = {k} tokens per row; compute-bound above "
        f"{model.hardware.operational_intensity:.0f}; in contexts above {model.critical_context(k):,.0f} tokens it is "
        "memory-bound at every batch size"
    )
    return title, frame


def roofline_tables(grid: CostGrid, found: Mapping, batch: int) -> Iterator[Titled]:
    """SSSD section 3.2: tokens until matrix products, and attention, are compute-bound."""
    hardware = grid.model.hardware

    def row(name: str, matrix: str, tokens: float) -> dict[str, str]:
        budget = ["any number" if math.isinf(n) else f"{n:,.0f}" for n in (tokens, tokens / batch)]
        return {"product": name, "matrix": matrix, "b x s_q": budget[0], f"s_q at b = {batch}": budget[1]}

    rows = [
        row(one["operation"], f"{one['inputs']:,} x {one['outputs']:,}", one["tokens"]) for one in found["products"]
    ]
    rows += [row("queries, as the paper prints", "", found["printed"])] if found["printed"] is not None else []
    title = f"{hardware.name}: tokens b x s_q until a product is compute-bound ({hardware.operational_intensity:.0f} "
    yield f"{title}FLOPs per byte, {hardware.weight_bytes:g} bytes per value)", table_of(rows)
    title = "attention, at any batch size: queries s_q per row until it is compute-bound"
    yield title, by_context(grid, "context", ["s_q"], [found["attention"]["tokens"]], "{:,.0f}")
