"""HTML pages that need nothing else: skeleton, style, tables, definitions, pictures as data URIs.

Text is escaped here; only `Markup` is taken as HTML.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from spectrain.reporting.formats import MISSING
from spectrain.reporting.svg import Plot

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 1.5rem; max-width: 80rem; background: #fff; color: #222; line-height: 1.45;
  font-family: system-ui, "Segoe UI", "DejaVu Sans", Verdana, sans-serif; font-size: 15px; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 60rem; } .note { color: #555; font-size: .9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .45rem; text-align: right; border-bottom: 1px solid #e3e3e3; }
th { font-weight: 600; border-bottom: 2px solid #999; max-width: 7.5rem; vertical-align: bottom; }
td { white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff; min-width: 10.5rem; max-width: 14rem; }
tr.baseline td { background: #f2f2f2; } small { display: block; white-space: nowrap; color: #555; font-weight: 400; }
.bad { color: #b00020; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: .5rem 0; font-size: .92rem; }
dt { font-weight: 600; max-width: 14rem; } dd { margin: 0; overflow-wrap: anywhere; }
code { background: #f2f2f2; padding: .1rem .3rem; } figure { margin: .6rem 0 0; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
"""


class Markup(str):
    """HTML: what it says is escaped already."""


def page(title: str, parts: Iterable[str], style: str = "", generator: str | None = None) -> str:
    """A whole page.

    Args:
        title: plain text.
        parts: HTML; empty ones are left out.
        style: CSS in addition to the style that all pages share.
        generator: the command that wrote it, by which it is known again.
    """
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}{style}</style>'
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    made_by = f'<meta name="generator" content="{escape(generator)}">' if generator else ""
    body = "\n".join(part for part in parts if part)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{made_by}{head}{viewport}</head>\n<body>\n{body}\n</body></html>\n'


def table(heads: Sequence[str], lines: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """A table that scrolls where it is too wide; what follows a line break in a text is set smaller.

    Args:
        heads: of the columns.
        lines: (class of the row or "", cells), a cell (text, class or ""). A column whose cells are all of class "left"
            or "wrap" has its head at the left, too.
    """
    lines = list(lines)
    html = ["<thead><tr>"]
    for i, head in enumerate(heads):
        at_left = bool(lines) and all(cells[i][1] in ("left", "wrap") for _, cells in lines)
        html.append(f'<th class="left">{two_lines(head)}</th>' if at_left else f"<th>{two_lines(head)}</th>")
    html.append("</tr></thead><tbody>")
    for row_class, cells in lines:
        html.append(f'<tr class="{row_class}">' if row_class else "<tr>")
        html += [
            f'<td class="{css}">{two_lines(text)}</td>' if css else f"<td>{two_lines(text)}</td>" for text, css in cells
        ]
        html.append("</tr>")
    return f'<div class="wide"><table>{"".join(html)}</tbody></table></div>'


def filled(
    heads: Sequence[str], lines: Sequence[tuple[str, Sequence[tuple[str, str]]]]
) -> tuple[list[str], list[tuple[str, list[tuple[str, str]]]]]:
    """Heads and lines of a table without the columns in which every cell is a dash."""
    kept = [i for i in range(len(heads)) if any(cells[i][0] != MISSING for _, cells in lines)]
    return [heads[i] for i in kept], [(row_class, [cells[i] for i in kept]) for row_class, cells in lines]


def two_lines(text: str) -> str:
    """Text as HTML, what follows its first line break as small print; Markup as it is."""
    if isinstance(text, Markup):
        return text
    first, _, second = text.partition("\n")
    return f"{escape(first)}<small>{escape(second)}</small>" if second else escape(first)


def definitions(items: Iterable[tuple[str, str]]) -> str:
    """Terms and what they are."""
    pairs = (f"<dt>{two_lines(_plain(term))}</dt><dd>{two_lines(_plain(text))}</dd>" for term, text in items)
    return f"<dl>{''.join(pairs)}</dl>"


def _plain(text: object) -> str:
    """Text whose line breaks mean nothing."""
    return text if isinstance(text, Markup) else Markup(escape(str(text)))


def heading(text: str, level: int = 2, anchor: str = "") -> str:
    identity = f' id="{escape(anchor)}"' if anchor else ""
    return f"<h{level}{identity}>{escape(text)}</h{level}>"


def note(text: str) -> str:
    """A paragraph of small print."""
    return f'<p class="note">{two_lines(text)}</p>'


def drawing(plot: Plot, level: int = 2) -> str:
    """A plot with its title as heading, and what it shows."""
    figure = f'<figure aria-label="{escape(plot.title)}">{plot.svg}</figure>'
    return f"{heading(plot.title, level)}{note(plot.explanation)}{figure}"


def picture(png: bytes, caption: str) -> str:
    """A PNG within the page."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<figure><img alt="{escape(caption)}" src="{source}"></figure>{note(caption)}'


def link(text: str, anchor: str) -> Markup:
    """To a place of the same page."""
    return Markup(f'<a href="#{escape(anchor)}">{escape(text)}</a>')


def folded(summary: str, html: str, is_open: bool = False) -> str:
    """What a reader opens by a click; `is_open`: or closes."""
    return f"<details{' open' * is_open}><summary>{two_lines(summary)}</summary>{html}</details>"
