"""Tables of a budget measurement for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from spectrain.decoding.budget import ForwardCost, NodeBudget, Rate
from spectrain.measure.statistics import Estimate
from spectrain.stores.budget_table import BudgetTable, CurveEntry


def forward_table(cost: ForwardCost) -> Table:
    """Milliseconds of a forward by nodes (down) and batch (across), for each context."""
    table = Table(title="forward of the target, ms (median; in brackets the interquartile range, % of it)")
    table.add_column("context", justify="right")
    table.add_column("nodes", justify="right")
    for batch_size in cost.batch_sizes:
        table.add_column(f"batch {batch_size}", justify="right")
    for j, context in enumerate(cost.contexts):
        for i, nodes in enumerate(cost.nodes):
            cells = [
                f"{1e3 * s[j]:.2f} ({100 * r[j]:.0f})" for s, r in zip(cost.seconds[i], cost.spread[i], strict=True)
            ]
            last = i == len(cost.nodes) - 1
            table.add_row(str(context) if i == 0 else "", str(nodes), *cells, end_section=last)
    return table


def roofline_line(cost: ForwardCost) -> str:
    """The fit in words."""
    fit = cost.roofline
    measured = (cost.nodes[0] * cost.batch_sizes[0], cost.nodes[-1] * cost.batch_sizes[-1])
    if fit.free_nodes <= measured[0]:
        # t0 and the weights cannot be told apart then: all that is seen is a constant and a slope.
        worth = fit.overhead_s / fit.node_s if fit.node_s > 0 else float("inf")
        free = f"none, every node counts from the first on; what a forward costs without any is worth {worth:.0f} nodes"
    elif fit.free_nodes >= measured[1]:
        free = f"{measured[1]} nodes or more: all that was measured waits for memory"
    else:
        free = f"{fit.free_nodes:.0f} nodes of the whole batch (b x s_q)"
    return (
        f"roofline: {1e3 * fit.overhead_s:.2f} ms + max({1e3 * fit.weights_s:.2f} ms, {1e6 * fit.node_s:.1f} us b n)"
        f" + b max({1e9 * fit.read_s:.1f} ns c, {1e9 * fit.attend_s:.1f} ns n c); median error {100 * fit.error:.0f} %"
        "\n"
        f"free speculation budget: {free}"
    )


def budget_tables(table: BudgetTable) -> list[Table]:
    """What each method's budget is, by batch and context, and what it is expected to give."""
    found = []
    for entry in table.entries:
        one = Table(title=f"{entry.name}: nodes that max_nodes=auto takes")
        for head in ("batch", "context", "nodes", "tau", "tokens/s", "/ one node"):
            one.add_column(head, justify="right")
        for batch_size in table.cost.batch_sizes:
            for j, context in enumerate(table.cost.contexts):
                best, plain = chosen(table, entry, batch_size, context)
                values = (str(best.nodes), f"{best.tau:.2f}", f"{best.tokens_per_s:.0f}")
                gain = f"{best.tokens_per_s / plain:.2f}"
                one.add_row(str(batch_size) if j == 0 else "", str(context), *values, gain)
        found.append(one)
    return found


def chosen(table: BudgetTable, entry: CurveEntry, batch_size: int, context: int) -> tuple[Rate, float]:
    """What the budget takes, and tokens/s of one node: a forward and the least that a step costs around it."""
    rates = NodeBudget(cost=table.cost, curve=entry.curve).rates(batch_size, context)
    best = max(rates, key=lambda rate: rate.tokens_per_s)
    return best, plain_tokens_per_s(table, entry, batch_size, context)


def plain_tokens_per_s(table: BudgetTable, entry: CurveEntry, batch_size: int, context: int) -> float:
    outside_s = min(entry.curve.outside_s(n, batch_size) for n in entry.curve.nodes)
    return batch_size / (table.cost.at(1, batch_size, context) + outside_s)


def discount_table(taus: Mapping[str, Estimate], chosen: str, n_texts: int) -> Table:
    """Acceptance length of SSSD's options; the chosen ones are bold."""
    title = f"sssd, simulated on {n_texts} responses that nothing was chosen on"
    table = Table("options", "tau", "95 %", title=title)
    for name, tau in taus.items():
        interval = f"\\[{tau.low:.3f}, {tau.high:.3f}]"
        table.add_row(name, f"{tau.value:.3f}", interval, style="bold" if name == chosen else "")
    return table
