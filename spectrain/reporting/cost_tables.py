"""The results of the throughput model as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from spectrain.measure.cost_analysis import (
    AUTOREGRESSIVE,
    CostGrid,
    Investment,
    Span,
    free_attention_tokens,
    free_budgets,
)

WORDS = ("", "method", "product", "layers x width", "tau is")  # heads of columns that begin at the left


def compact(value: float) -> str:
    """A count of tokens or rows on an axis: 8192, 64K."""
    return f"{value / 1024:g}K" if value >= 16384 and value % 1024 == 0 else f"{value:g}"


def table(title: str, rows: Iterable[Mapping[str, str]], caption: str | None = None) -> Table:
    """A table of rows by column head."""
    rows = list(rows)
    made = Table(title=title, caption=caption)
    for head in rows[0]:
        made.add_column(head, justify="left" if head in WORDS else "right", no_wrap=head not in WORDS)
    for row in rows:
        made.add_row(*row.values())
    return made


def all_tables(grid: CostGrid, options: Mapping, sources: Mapping, investments: Sequence[Investment]) -> list[Table]:
    """The tables that the views ask for.

    Args:
        grid: what was computed.
        options: of the command, for `roofline` and `views`.
        sources: where the shapes of target, vanilla and spire are from; and of each method's tau, under "tau".
        investments: of the cost analysis.
    """
    views, hardware, batch = options["views"], grid.model.hardware, grid.spot[0]
    compares = set(views) - {"intensity", "roofline"}  # those are about the target alone
    tables = [models_table(grid, sources, with_methods=bool(compares))]
    if "multiplier" in views:
        tables += [multiplier_table(grid, i) for i in range(len(grid.methods))]
    if "times" in views and hardware.flops_per_s is not None:
        title = f"{hardware.name}, batch {batch}: ms per step if both peaks are reached (k drafts + verify), tokens/s"
        tables.append(table(f"{title} of all rows", times_rows(grid)))
    if "break_even" in views:
        low, high = grid.ends
        rows = [
            {"batch": str(b)} | {pair: spans_text(spans, low, high) for pair, spans in grid.faster(b).items()}
            for b in grid.batch
        ]
        tables.append(table(f"context lengths of {low:,} to {high:,} tokens where method A beats method B", rows))
    if "analysis" in views:
        tables.append(analysis_table(grid, investments))
    if "intensity" in views:
        tables.append(intensity_table(grid))
    if "roofline" in views:
        tables += roofline_tables(grid, options["roofline"]["batch"], options["roofline"]["printed"])
    return tables


def by_context(grid: CostGrid, corner: str, head: str, cells: Iterable[str]) -> dict[str, str]:
    """A row with one cell per context length."""
    return {corner: head} | dict(zip(map(compact, grid.context_tokens), cells, strict=True))


def spans_text(spans: Sequence[Span], low: int, high: int) -> str:
    """Runs of context lengths in words; low and high are the ends of what was looked at."""
    words = []
    for first, last in spans:
        start, end = f"from {first:,}" * (first > low), f"to {last:,}" * (last < high)
        words.append(f"{first:,} {end}" if start and end else start or end or "all")
    return ", ".join(words) or "none"


def models_table(grid: CostGrid, sources: Mapping, with_methods: bool) -> Table:
    """What is compared, on which hardware."""
    model, hardware = grid.model, grid.model.hardware
    rows = []
    for method in (None, *(grid.methods if with_methods else ())):
        shape, name = (model.target, "target") if method is None else (method.shape, method.name)
        source = "the target" if name == "magicdec" else sources[name.removesuffix("_dense")]
        row = {
            "": name,
            "layers x width": f"{shape.n_layer} x {shape.hidden_size}, {source}",
            "parameters": f"{model.parameters(shape):,}",
            "KV": f"{shape.kv_values * hardware.kv_bytes:,.0f}",
        } | dict.fromkeys(("cache", "k", "tau", "tau is"), "")
        if method is not None:
            tau = sources["tau"][name]
            interval = "" if tau.get("low") is None else f" \\[{tau['low']:.3f}, {tau['high']:.3f}]"
            cache = "L" if method.budget is None else str(method.budget)
            row |= {"cache": cache, "k": str(method.k), "tau": f"{method.tau:.3f}{interval}", "tau is": tau["source"]}
        rows.append(row)
    return table(
        f"{hardware.name}: {hardware.operational_intensity:.0f} FLOPs per byte"
        + (f" in {hardware.dtype}" if hardware.dtype else "")
        + f"; {hardware.weight_bytes:g} bytes per weight, {hardware.kv_bytes:g} per KV value",
        rows,
        f"parameters: {'with' if model.count_unembedding else 'without'} the unembedding; KV: bytes per token; cache: "
        "tokens that a draft reads of a context of L; tau: tokens per step, the target's own included",
    )


def multiplier_table(grid: CostGrid, number: int) -> Table:
    """One panel of Figure 4; the cell of the cost analysis is bold."""
    method = grid.methods[number]
    rows = []
    for batch, values in zip(grid.batch, grid.multiplier(method), strict=True):
        cells = [
            f"[bold]{value:.2f}x[/bold]" if (batch, context) == grid.spot else f"{value:.2f}x"
            for context, value in zip(grid.context_tokens, values, strict=True)
        ]
        rows.append(by_context(grid, "batch \\ context", str(batch), cells))
    return table(f"{method.name} (tau = {method.tau:.3f}): throughput relative to autoregressive decoding", rows)


def times_rows(grid: CostGrid) -> list[dict[str, str]]:
    """Milliseconds of a step at the spot's batch size, one row per context length."""
    hardware, batch = grid.model.hardware, grid.spot[0]
    rows = []
    for context in grid.context_tokens:
        row = {"context": compact(context)}
        for method in grid.methods:
            step = grid.model.step(method, [batch], [context])
            costs = (step.draft, step.verify, step.step, step.target)
            draft, verify, whole, target = (hardware.milliseconds(cost).item() for cost in costs)
            row.setdefault(AUTOREGRESSIVE, f"{target:.3g}\n{1e3 * batch / target:,.0f}/s")
            rate = 1e3 * batch * method.tau / whole
            row[method.name] = f"{whole:.3g} ({method.k} x {draft:.3g} + {verify:.3g})\n{rate:,.0f}/s"
        rows.append(row)
    return rows


def analysis_table(grid: CostGrid, investments: Sequence[Investment]) -> Table:
    """SPIRe section 5: what training costs against what decoding saves."""
    rows = [
        {
            "method": one.method,
            "multiplier": f"{one.multiplier:.2f}x",
            "training": f"{one.training:.3f}",
            "decoding saved": f"{one.saved:.2f}",
            "saved in all": f"{one.net:.2f}",
            "pays from decoding of": "never" if math.isinf(pays := one.break_even_decoding) else f"{pays:.2f}",
        }
        for one in investments
    ]
    return table(
        f"cost analysis at batch {grid.spot[0]}, context {grid.spot[1]:,}, in units of the target's training; "
        f"plain decoding would cost {investments[0].decoding:g}",
        rows,
    )


def intensity_table(grid: CostGrid) -> Table:
    """Figure 3: FLOPs per byte of verifying k tokens per row, and from which batch size that is compute-bound."""
    model, contexts, k, corner = grid.model, grid.context_tokens, grid.methods[0].k, "batch x k \\ context"
    values = zip(grid.batch, model.intensity(grid.batch, contexts, k), strict=True)
    rows = [by_context(grid, corner, f"{b * k:,}", (f"{cell:,.0f}" for cell in cells)) for b, cells in values]
    limit = (f"{cell:,.0f}" for cell in model.intensity_limit(contexts, k))
    critical = ("never" if math.isinf(b) else f"{math.ceil(b):,}" for b in model.critical_batch(contexts, k))
    rows += [by_context(grid, corner, "any: below", limit)]
    rows += [by_context(grid, corner, "compute-bound from batch", critical)]
    return table(
        f"FLOPs per byte of verifying k = {k} tokens per row; compute-bound above "
        f"{model.hardware.operational_intensity:.0f}",
        rows,
        f"in contexts above {model.critical_context(k):,.0f} tokens it is memory-bound at every batch size",
    )


def roofline_tables(grid: CostGrid, batch: int, printed: float | None) -> list[Table]:
    """SSSD section 3.2: tokens until matrix products, and attention, are compute-bound.

    Args:
        grid: target and hardware.
        batch: rows, for s_q.
        printed: what a paper prints for the query projection, or None.
    """
    hardware, shape = grid.model.hardware, grid.model.target

    def row(name: str, matrix: str, tokens: float) -> dict[str, str]:
        budget = ["any number" if math.isinf(n) else f"{n:,.0f}" for n in (tokens, tokens / batch)]
        return {"product": name, "matrix": matrix, "b x s_q": budget[0], f"s_q at b = {batch}": budget[1]}

    rows = [row(b.operation, f"{b.inputs:,} x {b.outputs:,}", b.tokens) for b in free_budgets(hardware, shape)]
    rows += [row("queries, as the paper prints", "", printed)] if printed is not None else []
    free = free_attention_tokens(hardware, shape, grid.context_tokens)
    return [
        table(
            f"{hardware.name}: tokens b x s_q until a product is compute-bound "
            f"({hardware.operational_intensity:.0f} FLOPs per byte, {hardware.weight_bytes:g} bytes per value)",
            rows,
        ),
        table(
            "attention, at any batch size: queries s_q per row until it is compute-bound",
            [by_context(grid, "s_q \\ context", "s_q", (f"{tokens:,.0f}" for tokens in free))],
        ),
    ]
