"""One HTML page for a folder of runs: what was trained and measured, readable without knowing the project.

    python -m spectrain.report runs=runs out=report.html
    python -m spectrain.report runs=[runs,checkpoints,other/runs] out=all.html

Looks through the folders for trainings, finished or not, benchmarks, JSON files of measurements (cost,
drafters). The page holds its style and pictures and loads nothing. See docs/measuring.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from spectrain.cli import command
from spectrain.errors import UserError
from spectrain.reporting.collect import Collection
from spectrain.reporting.runs_page import GENERATOR, render_page
from spectrain.stores.environment import TYPED_COMMAND, date_of
from spectrain.stores.folder import locked
from spectrain.stores.writing import write_whole

HEAD_CHARACTERS = 400  # of a page: within them it says what wrote it


def main(cfg: DictConfig) -> None:
    given = cfg.runs if OmegaConf.is_list(cfg.runs) else [] if cfg.runs is None else [cfg.runs]
    roots, out = [Path(str(name)) for name in given], Path(str(cfg.out))
    with locked(out, otherwise=", or give another out", is_file=True):
        refuse_foreign(out, cfg.fresh)
        make_page(cfg, roots, out)


def make_page(cfg: DictConfig, roots: list[Path], out: Path) -> None:
    """Write the page, and say what it shows and what is left out."""
    collection = find(roots, cfg.max_folders)
    others = {1: "", 2: f" and {roots[-1]}"}.get(len(roots), f" and {len(roots) - 1} other folders")
    title = str(cfg.title or f"Runs in {roots[0]}{others}")
    html = render_page(collection, title, [str(root) for root in roots], date_of(), TYPED_COMMAND.get())
    write_whole(out, html)
    print(f"{out}: {len(collection.runs)} runs and measurements, {len(html) / 2**20:.1f} MiB")
    for path, reason in collection.unreadable.items():
        print(f"left out: {path}: {reason}", file=sys.stderr)


def find(roots: list[Path], max_folders: int) -> Collection:
    """Find everything that can be shown.

    Raises UserError where a folder is missing, there is nothing to show, or there are more than max_folders folders.
    """
    for root in roots:
        if not root.is_dir():
            raise UserError(f"runs={root} is no folder; give the folder that holds runs")
    collection = Collection.of(roots, max_folders)
    if not collection.runs:
        damaged = [f"; {path} cannot be read: {reason}" for path, reason in collection.unreadable.items()]
        nothing = f"runs={', '.join(map(str, roots))} holds no run or measurement that could be shown"
        raise UserError(f"{nothing}{''.join(damaged[:1])}; give another folder")
    return collection


def refuse_foreign(out: Path, fresh: bool) -> None:
    """Raise UserError where `out` is something that this command did not write."""
    if out.is_dir():
        raise UserError(f"out={out} is a folder; give the name of a file, such as out={out}/report.html")
    if out.exists() and not out.is_file():
        raise UserError(f"out={out} is no regular file; give another out")
    if not out.exists() or fresh:
        return
    with out.open(encoding="utf-8", errors="replace") as file:
        if f'content="{GENERATOR}"' not in file.read(HEAD_CHARACTERS):
            raise UserError(f"out={out} exists and is no page of this command; give another out or fresh=true")


if __name__ == "__main__":
    command("report")(main)()
