"""One page for a folder of runs: what was trained and measured, for a reader who has not seen the project.

Sections follow one another from the whole to the details; what is long is folded. Whatever a run lacks is a dash.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from markupsafe import Markup

from spectrain.errors import UserError
from spectrain.reporting import trainings
from spectrain.reporting.collect import Collection
from spectrain.reporting.render import render
from spectrain.reporting.runs import TRAININGS, Run, groups, natural

GENERATOR = "spectrain.report"  # by it a page of ours is recognised
SECTIONS = {"cost": "Throughput model", "drafters": "Drafters compared"}
KINDS = trainings.KINDS | {"bench": "benchmark"} | {kind: title.lower() for kind, title in SECTIONS.items()}
NOT_AS_EXPECTED = "its files are not as expected ({}: {})"
ODD = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, TemplateError, UserError)


def render_page(collection: Collection, title: str, sources: Sequence[str], date: str, command: str) -> str:
    """Fill the page of what was found in the folders `sources`; what cannot be shown is listed at its end.

    A run that makes no page, alone or beside those before it, because its files hold something else than they should,
    is taken out of the collection and noted there.
    """
    about = title, sources, date, command
    for leave_out in (_alone, _beside):
        try:
            return filled(collection, *about)
        except ODD:
            leave_out(collection, about)
    return filled(collection, *about)


def _alone(collection: Collection, about: tuple[str, Sequence[str], str, str]) -> None:
    """Leave out each run that alone makes no page."""
    for run in tuple(collection.runs):
        _leave_out(collection, run, _why_not([run], about))


def _beside(collection: Collection, about: tuple[str, Sequence[str], str, str]) -> None:
    """Leave out each run that makes no page beside those before it that do."""
    while _why_not(collection.runs, about):
        low, high = 1, len(collection.runs)  # the shortest beginning that makes no page has low + 1 to high runs
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if _why_not(collection.runs[:middle], about) else (middle, high)
        _leave_out(collection, collection.runs[high - 1], _why_not(collection.runs[:high], about))


def _why_not(runs: Sequence[Run], about: tuple[str, Sequence[str], str, str]) -> str | None:
    """Say why runs make no page; None: they make one."""
    try:
        filled(Collection(list(runs)), *about)
    except ODD as error:
        return NOT_AS_EXPECTED.format(type(error).__name__, error)
    return None


def _leave_out(collection: Collection, run: Run, why: str | None) -> None:
    if why:
        collection.runs.remove(run)
        collection.unreadable[str(run.path)] = why


def filled(collection: Collection, title: str, sources: Sequence[str], date: str, command: str) -> str:
    """Fill the page of all runs. Raises one of ODD where a file of a run holds something else than it should."""

    def part(run: Run, template: str, **values: object) -> Markup:
        """Fill a template with a run; empty where the run's files hold something else than they should."""
        try:
            return Markup(render(template, run=run, **values))
        except ODD as error:
            collection.unreadable[str(run.path)] = NOT_AS_EXPECTED.format(type(error).__name__, error)
            return Markup("")

    return render(
        "runs_page.html",
        part=part,
        title=title,
        generator=GENERATOR,
        sources=sources,
        date=date,
        command=command,
        runs=collection.runs,
        of_kind=collection.of_kind,
        kinds=KINDS,
        kinds_of_sections=SECTIONS,
        trained=groups(collection.of_kind(*TRAININGS)),
        benchmarks=sorted(collection.of_kind("bench"), key=lambda run: natural(run.name)),
        unreadable=collection.unreadable,
    )
