"""One HTML page for the benchmarks in some folders, readable without knowing the project.

    python -m spectrain.report runs=runs out=report.html
    python -m spectrain.report runs=[runs,other/runs] out=all.html

Looks through the folders for benchmarks, finished or not. See docs/measuring.md.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("spectrain.report")

import sys
from pathlib import Path

from spectrain.config.commands import Report
from spectrain.errors import UserError
from spectrain.measure.report_page import GENERATOR, render, sections_below
from spectrain.methods.options import names
from spectrain.stores.environment import date_now
from spectrain.stores.files import write_whole
from spectrain.terminal import stage

HEAD_CHARACTERS = 2000  # of a page: within them it says what wrote it


def main(options: Report) -> None:
    roots, out = [Path(name) for name in names(options.runs)], Path(options.out)
    check(roots, out, options.fresh)
    with stage("reading runs"):
        sections, left_out = sections_below(roots)
    if not sections:
        why = next((f"; {path} cannot be read ({reason})" for path, reason in left_out.items()), "")
        raise UserError(
            f"runs={', '.join(map(str, roots))} holds no benchmark that could be shown{why}; give another folder"
        )
    title = options.title or f"Benchmarks in {', '.join(map(str, roots))}"
    html = render(title, sections, left_out, f"These benchmarks were found on {date_now()}.")
    write_whole(out, html)
    print(f"{out}: {len(sections)} sections, {len(html) / 2**20:.1f} MiB")
    for path, reason in left_out.items():
        print(f"left out: {path}: {reason}", file=sys.stderr)


def check(roots: list[Path], out: Path, fresh: bool) -> None:
    """Raise UserError where a folder is missing, or `out` is something that this command did not write."""
    for root in roots:
        if not root.is_dir():
            raise UserError(f"runs={root} is no folder; give the folder that holds benchmarks")
    if out.is_dir():
        raise UserError(f"out={out} is a folder; give the name of a file, such as out={out}/report.html")
    before = out.read_text(encoding="utf-8", errors="replace")[:HEAD_CHARACTERS] if out.exists() else None
    if before is not None and not fresh and f'content="{GENERATOR}"' not in before:
        raise UserError(f"out={out} exists and is no page of this command; choose another out= or give fresh=true")
