"""A benchmark's results as a table for the terminal, and the cells that it shares with the page."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from spectrain.measure.results import BASELINE
from spectrain.reporting.formats import MISSING, count, fixed, number, percent, whole, with_half_width
from spectrain.reporting.plots import ordered


def render_table(results: Mapping) -> Table:
    """The results as a table for a terminal of 100 columns; what failed or was skipped stands below it."""
    methods = results["methods"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, caption_justify="left")
    table.add_column("method", overflow="fold", min_width=8)
    heads = ["answers", "mean\naccepted", "tokens/s", "speedup", "outside\nforward", "accepted/\ndrafted"]
    for head in [*heads, "lookup\nhits", "lossless"]:
        table.add_column(head, justify="right", no_wrap=True)
    for name in ordered(methods):
        one = methods[name]
        lossless = lossless_text(one).replace(" ", "")
        table.add_row(
            Text(f"{name}{'*' if is_peer(one) else ''}", style="dim" if name == BASELINE else ""),
            Text(answers(one), style="red" if whole(one, "errors") else ""),
            with_half_width(one, "mean_accepted", 2).replace("± ", "±"),
            fixed(one.get("tokens_per_s_micro"), 1),
            fixed(one.get("speedup"), 2, "x"),
            percent(outside(one)),
            percent(acceptance(one)),
            percent(one.get("retrieval_hit_rate"), 0),
            Text(lossless, style="red" if lossless.startswith("no") else ""),
        )
    notes = ["* peer: Hugging Face's own generation"] if any(map(is_peer, methods.values())) else []
    failed = {name: whole(one, "errors") for name, one in methods.items()}
    notes += [f"{name}: {count(n, 'question')} failed" for name, n in failed.items() if n]
    notes += [f"{name}: {one['warning']}" for name, one in results["methods"].items() if one.get("warning")]
    notes += [f"skipped {name}: {reason}" for name, reason in (results.get("skipped") or {}).items()]
    if notes:
        table.caption = Text("\n".join(notes))  # Text: brackets in a reason are no markup
    return table


def is_peer(one: Mapping) -> bool:
    return one.get("kind") == "peer"


def answers(one: Mapping) -> str:
    """How many questions were answered, of how many where some failed."""
    answered, failed = whole(one, "questions"), whole(one, "errors")
    return f"{answered}/{answered + failed}" if failed else str(answered)


def shown_name(name: str, one: Mapping) -> str:
    return f"{name} (peer)" if is_peer(one) else name


def outside(one: Mapping) -> float | None:
    """Share of the time that was not spent in the target's forward."""
    forward = number((one.get("time_share") or {}).get("forward"))
    return None if forward is None else 1.0 - forward


def acceptance(one: Mapping) -> float | None:
    """Share of the drafted tokens that were accepted."""
    drafted, accepted = number(one.get("drafted")), number(one.get("accepted"))
    return accepted / drafted if drafted and accepted is not None else None


def lossless_text(one: Mapping) -> str:
    """Yes or no, with the number of texts that differ; a dash where it was not judged."""
    if not isinstance(one.get("lossless"), bool):
        return MISSING
    return "yes" if one["lossless"] else f"no ({whole(one, 'greedy_mismatches')})"
