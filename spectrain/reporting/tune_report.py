"""What a page says of runs of `spectrain.tune`: node budgets, SSSD's discounts, fronts of stop rules."""

from __future__ import annotations

import io
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from spectrain.reporting.budget_plot import draw_acceptance, draw_budgets
from spectrain.reporting.budget_report import budget_tables, forward_table, roofline_line
from spectrain.reporting.formats import MISSING, count, estimate
from spectrain.reporting.found_runs import Tuning, option_text
from spectrain.reporting.page import definitions, folded, heading, note, picture, table
from spectrain.reporting.stopping_plot import draw_fronts
from spectrain.reporting.stopping_report import stopping_tables
from spectrain.stores.budget_table import BudgetTable

SEARCHES = {
    "budget": "node budget",
    "sssd": "SSSD's discounts",
    "specdecpp": "when drafts should end",
}


def tuning_parts(run: Tuning) -> list[str]:
    """Title and content of one run, as HTML."""
    title = heading(f"{run.name}: {SEARCHES.get(run.search, run.search)}", 3, run.anchor)
    if run.result is None:
        return [title, note(f"Unfinished; last written {run.seen or 'at an unknown time'}.")]
    parts = {"budget": _budget, "sssd": _discounts, "specdecpp": _fronts}.get(run.search)
    return [title, *(parts(run) if parts else [note(f"This page does not know results of method={run.search}.")])]


def _budget(run: Tuning) -> list[str]:
    """What nodes of a draft tree gain and cost."""
    if run.table is None:
        return [note("Its budget table could not be read; see the files left out.")]
    found = run.table
    told = (
        "Across: nodes of a draft tree, root included. Orange: tokens that one forward of the target yields; blue: "
        "what the forward costs, in forwards of one node; green: the speedup to be expected of both, higher is better; "
        "the star is what max_nodes=auto takes. A row of panels a method, a column a batch size."
    )
    gain = "Tokens that one forward yields (up, higher is better) against the nodes that a method may use."
    tables = "".join(map(_of_rich, [forward_table(found.cost), *budget_tables(found)]))
    return [
        definitions(_machine(found)),
        picture(_png(draw_acceptance, found), gain),
        note(roofline_line(found.cost)),
        folded("Gain and cost of nodes, a panel a method and batch size", picture(_png(draw_budgets, found), told)),
        folded("Milliseconds of a forward, and the budget of each method by batch and context", tables),
    ]


def _machine(found: BudgetTable) -> list[tuple[str, str]]:
    machine = ", ".join(f"{key} {value}" for key, value in found.machine.items() if value is not None)
    facts = {"measured on": machine, "target": found.facts.get("target"), "prompts": found.facts.get("prompts")}
    facts["date"] = found.facts.get("date")
    return [(name, str(value)) for name, value in facts.items() if value]


def _discounts(run: Tuning) -> list[str]:
    """tau of the defaults and of what was chosen, on responses that nothing was chosen on."""
    chosen_on, told_on = (run.result.get("responses") or [MISSING, MISSING])[:2]
    told = note(
        f"tau (tokens a target forward, higher is better) simulated on {told_on} responses that nothing was chosen "
        f"on, with 95 % intervals; {count(len(run.result.get('tried') or ()), 'combination')} tried on {chosen_on}."
    )
    scores = run.result["tau"]
    lines = [
        ("", [(name, "left"), (estimate(dict(zip(("value", "low", "high"), three, strict=True)), 3), "")])
        for name, three in scores.items()
    ]
    plain = {key: value for key, value in run.result["chosen"].items() if not isinstance(value, Mapping)}
    chosen = ", ".join(option_text(key, value) for key, value in plain.items()) or "the defaults"
    more = " and a calibration table of the sources" if len(plain) < len(run.result["chosen"]) else ""
    return [told, table(["options", "tau"], lines), note(f"Chosen: {chosen}{more}.")]


def _fronts(run: Tuning) -> list[str]:
    """The Pareto front of stop rules, and the tables of the terminal."""
    told = (
        "Across: target calls a token (fewer is faster); up: drafted tokens thrown away a token (fewer is less work). "
        "Towards the lower left is better; a point is one setting, a line the front of a family."
    )
    facts = run.result
    given = {
        "target": facts.get("target"),
        "drafter": " ".join(str(value) for value in (facts.get("drafter") or {}).values()),
        "prompts": f"{facts.get('prompts')} ({facts.get('texts')} texts, {facts.get('timed')} of them timed)",
        "sampling": facts.get("sampling"),
        "device": f"{facts.get('device')}, {facts.get('dtype')}, {facts.get('threads')} CPU threads",
        "date": facts.get("date"),
    }
    tables = [_of_rich(part) if isinstance(part, Table) else note(part) for part in stopping_tables(facts)]
    return [
        definitions((name, str(value)) for name, value in given.items() if value),
        picture(_png(draw_fronts, facts), told),
        tables[0],
        folded("Areas under the fronts, differences, each head, seconds of a forward", "".join(tables[1:])),
    ]


def _png(draw, *what: object) -> bytes:
    """What a drawing function writes, which takes a file as its last argument."""
    buffer = io.BytesIO()
    draw(*what, buffer)
    return buffer.getvalue()


def _of_rich(found: Table) -> str:
    """A table for the terminal as HTML: title, heads, rows."""
    heads = [_plain(column.header) for column in found.columns]
    rows = zip(*(column.cells for column in found.columns), strict=True)
    left = [column.justify == "left" for column in found.columns]
    lines = [
        ("", [(_plain(cell), "left" if at_left else "") for cell, at_left in zip(row, left, strict=True)])
        for row in rows
    ]
    title = note(_plain(found.title)) if found.title else ""
    return title + (table(heads, lines) if lines else "")


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain
