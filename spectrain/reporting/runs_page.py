"""One page for a folder of runs: what was trained and measured, for a reader who has not seen the project.

Sections follow one another from the whole to the details; what is long is folded. Whatever a run lacks is a dash.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from markupsafe import Markup

from spectrain.decoding.errors import UserError
from spectrain.measure.results import BASELINE
from spectrain.reporting import trainings
from spectrain.reporting.collect import Collection
from spectrain.reporting.render import render
from spectrain.reporting.runs import TRAININGS, Run, groups, natural

GENERATOR = "spectrain.report"  # by it a page of ours is recognised
SECTIONS = {"tune": "Tuning", "cost": "Throughput model", "drafters": "Drafters compared", "parity": "Parity"}
KINDS = trainings.KINDS | {"bench": "benchmark"} | {kind: title.lower() for kind, title in SECTIONS.items()}
FEW = 3  # benchmarks: the details of so many stand open
ODD = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, TemplateError, UserError)


def render_page(collection: Collection, title: str, sources: Sequence[str], date: str, command: str) -> str:
    """The whole page; what cannot be shown is listed at its end.

    Args:
        collection: what was found.
        title: of the page.
        sources: folders that were looked through.
        date: of today.
        command: that writes the page.
    """
    unreadable = dict(collection.unreadable)

    def guarded(run: Run, template: str, **values: object) -> Markup:
        """What a template makes of a run; empty where the run's files hold something else than they should."""
        try:
            return Markup(render(template, run=run, **values))
        except ODD as error:
            unreadable[str(run.path)] = f"its results are not as expected ({type(error).__name__}: {error})"
            return Markup("")

    grouped = groups(collection.of_kind(*TRAININGS))
    trained = [
        (trainings.title_of(runs), guarded(runs[0], "training.html", runs=runs, prefix=f"g{i}-"), [])
        for i, runs in enumerate(grouped)
    ]
    benchmarks = sorted(collection.of_kind("bench"), key=lambda run: natural(run.name))
    finished = [run for run in benchmarks if run.result is not None]
    shown = [
        (run, guarded(run, "benchmark.html", prefix=f"b{i}-", is_open=len(finished) <= FEW))
        for i, run in enumerate(finished)
    ]
    others = []
    for kind, heading in SECTIONS.items():
        html = Markup("").join(guarded(run, f"{kind}.html") for run in collection.of_kind(kind))
        others += [(heading, html, [])] if html else []
    measured = [*benchmarks, *collection.of_kind(*SECTIONS)]
    counts = {
        "training": collection.of_kind(*TRAININGS),
        "benchmark": benchmarks,
        "tuning run": collection.of_kind("tune"),
        "other measurement": collection.of_kind("cost", "drafters", "parity"),
    }
    return render(
        "runs_page.html",
        title=title,
        generator=GENERATOR,
        sources=sources,
        date=date,
        command=command,
        counts=counts,
        kinds=KINDS,
        trained=grouped,
        one_scale=trainings.on_one_scale(counts["training"]),
        measured=[(run, guarded(run, "outcome.html")) for run in measured],
        training_sections=trained,
        shown=shown,
        methods=sorted({name for run in finished for name in run.result["methods"]}, key=lambda n: (n != BASELINE, n)),
        unfinished=[run for run in benchmarks if run.result is None],
        others=others,
        runs=collection.runs,
        unreadable=unreadable,
    )
