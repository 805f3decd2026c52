"""The throughput model's results as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.table import Table

from spectrain.measure.cost import Method, Shape
from spectrain.measure.cost_analysis import (
    AUTOREGRESSIVE,
    Comparison,
    FreeBudget,
    Investment,
    Span,
    free_attention_tokens,
    free_budgets,
)


def compact(value: float) -> str:
    """A count of tokens or rows on an axis: 8192, 64K."""
    return f"{value / 1024:g}K" if value >= 16384 and value % 1024 == 0 else f"{value:g}"


def spans_text(spans: Sequence[Span], low: int, high: int) -> str:
    """Runs of context lengths in words, where low and high are the ends of what was looked at."""
    words = []
    for first, last in spans:
        if (first, last) == (low, high):
            words.append("all")
        elif last == high:
            words.append(f"from {first:,}")
        elif first == low:
            words.append(f"to {last:,}")
        else:
            words.append(f"{first:,} to {last:,}")
    return ", ".join(words) or "none"


def models_table(
    found: Comparison, methods: Sequence[Method], sources: Mapping[str, str], tau: Mapping[str, Mapping]
) -> Table:
    """What is compared.

    Args:
        found: target and hardware.
        methods: those to show.
        sources: of the shapes of `target`, `vanilla`, `spire`.
        tau: method -> {"source", and "low", "high" where it was measured}.
    """
    model, hardware = found.model, found.model.hardware
    counted = "with" if model.count_unembedding else "without"
    table = Table(
        title=f"{hardware.name}: {hardware.operational_intensity:.0f} FLOPs a byte"
        + (f" in {hardware.dtype}" if hardware.dtype else "")
        + f"; {hardware.weight_bytes:g} bytes a weight, {hardware.kv_bytes:g} a KV value",
        caption=f"parameters: {counted} the unembedding; KV: bytes a token; cache: tokens that a draft reads of a "
        "context of L; tau: tokens a step, the target's own included",
    )
    for name in ("", "layers x width", "parameters", "KV", "cache", "k", "tau", "tau is"):
        table.add_column(name, justify="right" if name in ("parameters", "KV", "cache", "k", "tau") else "left")

    def row(name: str, shape: Shape, source: str, *rest: str) -> None:
        kv = f"{shape.kv_values * hardware.kv_bytes:,.0f}"
        dimensions = f"{shape.n_layer} x {shape.hidden_size}, {source}"
        table.add_row(name, dimensions, f"{model.parameters(shape):,}", kv, *rest)

    row("target", model.target, sources["target"], "", "", "", "")
    for method in methods:
        source = "the target" if method.name == "magicdec" else sources[method.name.removesuffix("_dense")]
        known = tau[method.name]
        interval = f" \\[{known['low']:.3f}, {known['high']:.3f}]" if known.get("low") is not None else ""
        cache = "L" if method.budget is None else str(method.budget)
        row(method.name, method.shape, source, cache, str(method.k), f"{method.tau:.3f}{interval}", known["source"])
    return table


def multiplier_table(found: Comparison, method: Method) -> Table:
    """One panel of Figure 4; the cell of the cost analysis is bold."""
    table = Table(title=f"{method.name} (tau = {method.tau:.3f}): throughput relative to autoregressive decoding")
    _contexts(table, "batch \\ context", found.context_tokens)
    for rows, cells in zip(found.batch, found.multiplier(method), strict=True):
        texts = {context: f"{cell:.2f}x" for context, cell in zip(found.context_tokens, cells, strict=True)}
        if rows == found.spot[0] and found.spot[1] in texts:
            texts[found.spot[1]] = f"[bold]{texts[found.spot[1]]}[/bold]"
        table.add_row(str(rows), *texts.values())
    return table


def times_table(found: Comparison) -> Table:
    """Milliseconds of a step at the spot's batch size, if both peaks are reached."""
    hardware, batch = found.model.hardware, found.spot[0]
    table = Table(
        title=f"{hardware.name}, batch {batch}: ms a step if both peaks are reached (k drafts + verify), tokens/s of "
        "all rows"
    )
    table.add_column("context", justify="right")
    for name in (AUTOREGRESSIVE, *(method.name for method in found.methods)):
        table.add_column(name, justify="right")
    columns = []
    for method in found.methods:
        step = found.model.step(method, [batch], found.context_tokens)
        costs = (step.draft, step.verify, step.step, step.target)
        draft, verify, whole, target = (hardware.milliseconds(cost)[0] for cost in costs)
        if not columns:
            columns.append([f"{t:.3g}\n{1e3 * batch / t:,.0f}/s" for t in target])
        rates = 1e3 * batch * method.tau / whole
        columns.append(
            [
                f"{s:.3g} ({method.k} x {d:.3g} + {v:.3g})\n{rate:,.0f}/s"
                for s, d, v, rate in zip(whole, draft, verify, rates, strict=True)
            ]
        )
    for context, cells in zip(found.context_tokens, zip(*columns, strict=True), strict=True):
        table.add_row(compact(context), *cells)
    return table


def break_even_table(found: Comparison) -> Table:
    """Contexts, by batch size, in which a method pays, and in which one beats another."""
    low, high = found.ends
    table = Table(title=f"contexts of {low:,} to {high:,} tokens in which the left is faster than the right")
    table.add_column("batch", justify="right")
    for name in found.pays(found.batch[0]):
        table.add_column(f"{name} > plain")
    for name in found.overtakes(found.batch[0]):
        table.add_column(name)
    for batch in found.batch:
        cells = [*found.pays(batch).values(), *found.overtakes(batch).values()]
        table.add_row(str(batch), *(spans_text(spans, low, high) for spans in cells))
    return table


def analysis_table(investments: Sequence[Investment], spot: tuple[int, int]) -> Table:
    """Section 5: what training costs against what decoding saves."""
    decoding = investments[0].decoding
    table = Table(
        title=f"cost analysis at batch {spot[0]}, context {spot[1]:,}, in units of the target's training; "
        f"{decoding:g} would be spent on plain decoding"
    )
    for name in ("method", "multiplier", "training", "decoding saved", "saved in all", "pays from decoding of"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for one in investments:
        pays = "never" if math.isinf(one.break_even_decoding) else f"{one.break_even_decoding:.2f}"
        cells = (f"{one.multiplier:.2f}x", f"{one.training:.3f}", f"{one.saved:.2f}", f"{one.net:.2f}", pays)
        table.add_row(one.method, *cells)
    return table


def intensity_table(found: Comparison) -> Table:
    """Figure 3: FLOPs a byte of verifying k tokens a row, and from which batch on that is compute-bound."""
    model, contexts, k = found.model, found.context_tokens, found.methods[0].k
    limit, critical = model.intensity_limit(contexts, k), model.critical_batch(contexts, k)
    table = Table(
        title=f"FLOPs a byte of verifying k = {k} tokens a row; compute-bound above "
        f"{model.hardware.operational_intensity:.0f}",
        caption=f"in contexts above {model.critical_context(k):,.0f} tokens it is memory-bound at every batch",
    )
    _contexts(table, "batch x k \\ context", contexts)
    for rows, cells in zip(found.batch, model.intensity(found.batch, contexts, k), strict=True):
        table.add_row(f"{rows * k:,}", *(f"{cell:,.0f}" for cell in cells))
    table.add_section()
    table.add_row("any: below", *(f"{cell:,.0f}" for cell in limit))
    table.add_row("compute-bound from batch", *("never" if math.isinf(b) else f"{math.ceil(b):,}" for b in critical))
    return table


def roofline_tables(found: Comparison, batch: int, printed: float | None) -> tuple[Table, Table]:
    """SSSD section 3.2: tokens that matrix products, and attention, take until they are compute-bound.

    Args:
        found: target and hardware.
        batch: rows, for s_q.
        printed: what a paper prints for the query projection, or None.
    """
    hardware, shape = found.model.hardware, found.model.target
    table = Table(
        title=f"{hardware.name}: tokens b x s_q until a product is compute-bound "
        f"({hardware.operational_intensity:.0f} FLOPs a byte, {hardware.weight_bytes:g} bytes a value)"
    )
    for name in ("product", "matrix", "b x s_q", f"s_q at b = {batch}"):
        table.add_column(name, justify="left" if name == "product" else "right")
    for one in free_budgets(hardware, shape):
        table.add_row(*_budget_cells(one, batch))
    if printed is not None:
        table.add_section()
        table.add_row("queries, as the paper prints", "", f"{printed:,.0f}", f"{printed / batch:,.0f}")
    attention = Table(title="attention, whatever the batch: queries s_q a row until it is compute-bound")
    _contexts(attention, "s_q \\ context", found.context_tokens)
    free = free_attention_tokens(hardware, shape, found.context_tokens)
    attention.add_row("s_q", *(f"{tokens:,.0f}" for tokens in free))
    return table, attention


def _budget_cells(one: FreeBudget, batch: int) -> tuple[str, str, str, str]:
    matrix = f"{one.inputs:,} x {one.outputs:,}"
    if math.isinf(one.tokens):
        return one.operation, matrix, "any number", "any number"
    return one.operation, matrix, f"{one.tokens:,.0f}", f"{one.tokens / batch:,.0f}"


def _contexts(table: Table, corner: str, context_tokens: Sequence[int]) -> None:
    table.add_column(corner, justify="right", no_wrap=True)
    for context in context_tokens:
        table.add_column(compact(context), justify="right", no_wrap=True)
