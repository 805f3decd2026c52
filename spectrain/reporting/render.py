"""Fill the templates of pages. Text is escaped there; only `Markup` is taken as HTML."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure

from spectrain.decoding import Sampling
from spectrain.reporting import benchmarks, comparisons, cost_plots, formats, plots, trainings
from spectrain.reporting.drawing import png_bytes
from spectrain.reporting.runs import Run, option_text
from spectrain.reporting.tables import Marked, columns_of_words
from spectrain.stores.writing import write_whole

STRONGEST = 0.75  # opacity of a heat map's cell
TWICE = 2.0  # a multiplier at which the colour is that strong


def write_report(path: Path, results: Mapping, rows: Sequence[Mapping]) -> None:
    """Write `report.html` of a benchmark from its results.json and questions.jsonl; it needs no other file."""
    title = f"Speculative decoding on {results.get('target', 'a target model')}"
    html = render("benchmark_page.html", title=title, benchmark=benchmarks.benchmark_parts(results, rows))
    write_whole(path, html)


def render(template: str, **values: object) -> str:
    """A template of templates/, filled with values."""
    return environment().get_template(template).render(**values)


@cache
def environment() -> Environment:
    environment = Environment(loader=PackageLoader(__package__), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = ("fixed", "percent", "interval", "count", "number", "plus_minus", "measured")
    environment.filters |= {name: getattr(formats, name) for name in text}
    environment.filters |= {"columns_of_words": columns_of_words, "shade": shade, "png": png, "json": json.dumps}
    environment.filters["sampling"] = sampling_text
    environment.tests["marked"] = lambda cell: isinstance(cell, Marked)
    modules = (benchmarks, comparisons, cost_plots, plots, trainings)
    environment.globals |= {module.__name__.rpartition(".")[2]: module for module in modules}
    environment.globals |= {"zip": zip, "MISSING": formats.MISSING, "option_text": option_text, "pictures": pictures}
    return environment


def pictures(
    run: Run, caption: str = "", draw: Callable[[Mapping], Figure | None] | None = None
) -> list[tuple[str, bytes | Figure]]:
    """The captions and figures that a file names, or else the one that `draw` makes of its content."""
    named = {str(one.get("file")).rsplit("/", 1)[-1]: one.get("caption") for one in run.result.get("figures") or ()}
    found = [(str(text or name), run.pictures[name]) for name, text in named.items() if name in run.pictures]
    figure = draw(run.result) if draw and not found else None
    return found if figure is None else [(caption, figure)]


def png(picture: Figure | bytes) -> str:
    """A figure, or the content of a PNG, as what an `img` takes for its source."""
    if isinstance(picture, Figure):
        picture = png_bytes(picture)
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def sampling_text(results: Mapping) -> str:
    """The sampling of a benchmark."""
    return Sampling(**{k: v for k, v in (results.get("sampling") or {}).items() if v is not None}).describe()


def shade(cell: object) -> str:
    """The style of a heat map's cell: blue above 1, orange below, the further from 1 the stronger."""
    value = formats.number(cell)
    if value is None or value <= 0:
        return ""
    share = min(1.0, (max(value, 1 / value) - 1) / (TWICE - 1))
    colour = "0,114,178" if value > 1 else "213,94,0"
    return f"background:rgba({colour},{STRONGEST * share:.2f})" + (";color:#fff" if share > 0.85 else "")
