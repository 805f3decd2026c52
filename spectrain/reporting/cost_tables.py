"""The results of the throughput model as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pandas import DataFrame

from spectrain.measure.cost import Method
from spectrain.measure.cost_analysis import (
    AUTOREGRESSIVE,
    CostGrid,
    Investment,
    Span,
    free_attention_tokens,
    free_budgets,
)
from spectrain.reporting.tables import table_of

Titled = tuple[str, DataFrame]


def compact(value: float) -> str:
    """A count of tokens or rows on an axis: 8192, 64K."""
    return f"{value / 1024:g}K" if value >= 16384 and value % 1024 == 0 else f"{value:g}"


def cost_tables(
    grid: CostGrid, views: Sequence[str], sources: Mapping, tau: Mapping, roofline: Mapping, invested: list[Investment]
) -> Iterator[Titled]:
    """The titles and tables that the views ask for.

    Args:
        grid: what was computed.
        views: of the command.
        sources: where the shapes of target, vanilla and spire are from.
        tau: method -> {"source", and "low", "high" where it was measured}.
        roofline: `batch`, for s_q; `printed`, what a paper prints for the query projection, or None.
        invested: the cost analysis.
    """
    yield models_table(grid, set(views) - {"intensity", "roofline"}, sources, tau)
    if "multiplier" in views:
        for method in grid.methods:
            title = f"{method.name} (tau = {method.tau:.3f}): throughput relative to autoregressive decoding"
            yield title, by_context(grid, "batch", grid.batch, grid.multiplier(method), "{:.2f}x")
    if "times" in views and grid.model.hardware.flops_per_s is not None:
        yield times_table(grid)
    if "break_even" in views:
        low, high = grid.ends
        title = f"context lengths of {low:,} to {high:,} tokens where one is faster than the other"
        rows = ({pair: spans_text(spans, low, high) for pair, spans in grid.faster(b).items()} for b in grid.batch)
        yield title, table_of({"batch": str(b)} | row for b, row in zip(grid.batch, rows, strict=True))
    if "analysis" in views:
        title = f"cost analysis at batch {grid.spot[0]}, context {grid.spot[1]:,}, in units of the target's training; "
        yield f"{title}plain decoding would cost {invested[0].decoding:g}", table_of(map(investment_row, invested))
    if "intensity" in views:
        yield intensity_table(grid)
    if "roofline" in views:
        yield from roofline_tables(grid, **roofline)


def by_context(grid: CostGrid, corner: str, heads: Iterable, cells: Iterable[Iterable], form: str) -> DataFrame:
    """Numbers by context length, one row per head."""
    names = [corner, *map(compact, grid.context_tokens)]
    rows = (
        [str(head), *(cell if isinstance(cell, str) else form.format(cell) for cell in row)]
        for head, row in zip(heads, cells, strict=True)
    )
    return table_of(dict(zip(names, row, strict=True)) for row in rows)


def spans_text(spans: Sequence[Span], low: int, high: int) -> str:
    """Runs of context lengths in words; low and high are the ends of what was looked at."""
    words = []
    for first, last in spans:
        start, end = f"from {first:,}" if first > low else "", f"to {last:,}" if last < high else ""
        words.append(f"{first:,} {end}" if start and end else start or end or "all")
    return ", ".join(words) or "none"


def models_table(grid: CostGrid, compared: Iterable[str], sources: Mapping, tau: Mapping) -> Titled:
    """What is compared, on which hardware; the target alone where no view compares."""
    model, hardware = grid.model, grid.model.hardware

    def row(name: str, method: Method | None = None) -> dict[str, str]:
        shape = model.target if method is None else method.shape
        source = "the target" if name == "magicdec" else sources[name.removesuffix("_dense")]
        cells = {
            "model: layers x width": f"{name}: {shape.n_layer} x {shape.hidden_size}, {source}",
            "parameters": f"{model.parameters(shape):,}",
            "KV": f"{shape.kv_values * hardware.kv_bytes:,.0f}",
        }
        if method is None:
            return cells
        known = tau[name]
        interval = "" if known.get("low") is None else f" [{known['low']:.3f}, {known['high']:.3f}]"
        cache = "L" if method.budget is None else str(method.budget)
        return cells | {
            "cache": cache,
            "k": str(method.k),
            "tau": f"{method.tau:.3f}{interval}",
            "tau is": known["source"],
        }

    title = (
        f"{hardware.name}: {hardware.operational_intensity:.0f} FLOPs per byte"
        + (f" in {hardware.dtype}" if hardware.dtype else "")
        + f"; {hardware.weight_bytes:g} bytes per weight, {hardware.kv_bytes:g} per KV value\nparameters: "
        + f"{'with' if model.count_unembedding else 'without'} the unembedding; KV: bytes per token; cache: tokens "
        "that a draft reads of a context of L; tau: tokens per step, the target's own included"
    )
    return title, table_of([row("target"), *(row(m.name, m) for m in grid.methods if compared)])


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
    title = (
        f"{hardware.name}, batch {batch}: ms per step if both peaks are reached (k drafts + verify), tokens/s of all"
    )
    return f"{title} rows", table_of(rows)


def investment_row(one: Investment) -> dict[str, str]:
    """SPIRe section 5: what training costs against what decoding saves."""
    return {
        "method": one.method,
        "multiplier": f"{one.multiplier:.2f}x",
        "training": f"{one.training:.3f}",
        "decoding saved": f"{one.saved:.2f}",
        "saved in all": f"{one.net:.2f}",
        "pays from decoding of": "never" if math.isinf(pays := one.break_even_decoding) else f"{pays:.2f}",
    }


def intensity_table(grid: CostGrid) -> Titled:
    """Figure 3: FLOPs per byte of verifying k tokens per row, and from which batch size that is compute-bound."""
    model, contexts, k = grid.model, grid.context_tokens, grid.methods[0].k
    critical = ["never" if math.isinf(b) else f"{math.ceil(b):,}" for b in model.critical_batch(contexts, k)]
    heads = [*(f"{batch * k:,}" for batch in grid.batch), "any: below", "compute-bound from batch"]
    cells = [*model.intensity(grid.batch, contexts, k), model.intensity_limit(contexts, k), critical]
    title = (
        f"FLOPs per byte of verifying k = {k} tokens per row; compute-bound above "
        f"{model.hardware.operational_intensity:.0f}; in contexts above {model.critical_context(k):,.0f} tokens it is "
        "memory-bound at every batch size"
    )
    return title, by_context(grid, "batch x k", heads, cells, "{:,.0f}")


def roofline_tables(grid: CostGrid, batch: int, printed: float | None) -> Iterator[Titled]:
    """SSSD section 3.2: tokens until matrix products, and attention, are compute-bound."""
    hardware, shape = grid.model.hardware, grid.model.target

    def row(name: str, matrix: str, tokens: float) -> dict[str, str]:
        budget = ["any number" if math.isinf(n) else f"{n:,.0f}" for n in (tokens, tokens / batch)]
        return {"product": name, "matrix": matrix, "b x s_q": budget[0], f"s_q at b = {batch}": budget[1]}

    rows = [row(b.operation, f"{b.inputs:,} x {b.outputs:,}", b.tokens) for b in free_budgets(hardware, shape)]
    rows += [row("queries, as the paper prints", "", printed)] if printed is not None else []
    title = f"{hardware.name}: tokens b x s_q until a product is compute-bound ({hardware.operational_intensity:.0f} "
    yield f"{title}FLOPs per byte, {hardware.weight_bytes:g} bytes per value)", table_of(rows)
    free = free_attention_tokens(hardware, shape, grid.context_tokens)
    title = "attention, at any batch size: queries s_q per row until it is compute-bound"
    yield title, by_context(grid, "context", ["s_q"], [free], "{:,.0f}")
