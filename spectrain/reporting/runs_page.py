"""One page for a folder of runs: what was trained and measured, for a reader who has not seen the project.

Sections follow one another from the whole to the details; what is long is folded. Whatever a run lacks is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jinja2 import TemplateError
from markupsafe import Markup
from matplotlib.figure import Figure

from spectrain.decoding.errors import UserError
from spectrain.measure.results import BASELINE
from spectrain.reporting import cost_plots, plots, trainings
from spectrain.reporting.benchmarks import benchmark_parts, drafting
from spectrain.reporting.collect import Collection
from spectrain.reporting.comparisons import drafters_table, highest_tau, parity_table, settings_of
from spectrain.reporting.render import render
from spectrain.reporting.runs import TRAININGS, Run, groups, natural
from spectrain.reporting.tuning import budget_parts, stopping_parts

GENERATOR = "spectrain.report"  # by it a page of ours is recognised
SECTIONS = {"tune": "Tuning", "cost": "Throughput model", "drafters": "Drafters compared", "parity": "Parity"}
KINDS = trainings.KINDS | {"bench": "benchmark"} | {kind: title.lower() for kind, title in SECTIONS.items()}
LIBRARIES = ("spectrain", "torch", "lightning", "transformers", "python")
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

    def guarded(run: Run, template: str, values: Callable[..., Mapping], *arguments: object) -> Markup:
        """A template filled with values(*arguments); empty where the run's files hold something else."""
        try:
            return Markup(render(template, run=run, **values(*arguments)))
        except ODD as error:
            unreadable[str(run.path)] = f"its results are not as expected ({type(error).__name__}: {error})"
            return Markup("")

    grouped = groups(collection.of_kind(*TRAININGS))
    trained = [
        (trainings.title_of(runs), guarded(runs[0], "training.html", trainings.training_parts, runs, f"g{i}-"), [])
        for i, runs in enumerate(grouped)
    ]
    benchmarks = sorted(collection.of_kind("bench"), key=lambda run: natural(run.name))
    finished = [run for run in benchmarks if run.result is not None]
    shown = [
        (run, guarded(run, "benchmark.html", benchmark_values, run, f"b{i}-", len(finished) <= FEW))
        for i, run in enumerate(finished)
    ]
    others = []
    for kind, heading in SECTIONS.items():
        html = Markup("").join(guarded(run, f"{kind}.html", VALUES[kind], run) for run in collection.of_kind(kind))
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
        trained=[{"runs": runs, "different": trainings.different(runs)} for runs in grouped],
        one_scale=trainings.on_one_scale(counts["training"]),
        measured=[(run, guarded(run, "outcome.html", outcome_values, run)) for run in measured],
        trainings=trained,
        benchmarks=shown,
        methods=sorted({name for run in finished for name in run.result["methods"]}, key=lambda n: (n != BASELINE, n)),
        unfinished=[run for run in benchmarks if run.result is None],
        others=others,
        runs=collection.runs,
        unreadable=unreadable,
    )


def benchmark_values(run: Run, prefix: str, is_open: bool) -> dict:
    return {"benchmark": benchmark_parts(run.result, run.rows, prefix), "is_open": is_open}


def tuning_values(run: Run) -> dict:
    if run.result is None:
        return {}
    if run.search == "specdecpp":
        return {"tables": stopping_parts(run.result), "figures": [cost_plots.stopping_fronts(run.result)]}
    if run.search == "budget" and run.budgets is not None:
        figures = [cost_plots.budget_acceptance(run.budgets), cost_plots.budgets(run.budgets)]
        return {"tables": budget_parts(run.budgets), "figures": figures}
    if run.search != "sssd":
        return {}
    plain = {key: value for key, value in run.result["chosen"].items() if not isinstance(value, Mapping)}
    calibrated = " and a calibration table of the sources" if len(plain) < len(run.result["chosen"]) else ""
    return {"chosen": f"{trainings.options_text(plain) or 'the defaults'}{calibrated}"}


def drafters_values(run: Run) -> dict:
    table = drafters_table(run.result, settings_of(run.result))
    return {
        "drafters": table,
        "pictures": pictures(run, "tau of each drafter; further right is better.", plots.drafters),
    }


def parity_values(run: Run) -> dict:
    tables = {
        part: parity_table(run.result.get(part) or {}, run.result["positions"]) for part in ("rows", "differences")
    }
    return tables | {"pictures": pictures(run, "Acceptance by position; higher is better.", plots.parity)}


VALUES = {  # kind -> what its template shows beside the run itself
    "tune": tuning_values,
    "cost": lambda run: {"pictures": pictures(run)},
    "drafters": drafters_values,
    "parity": parity_values,
}


def pictures(
    run: Run, caption: str = "", draw: Callable[[Mapping], Figure | None] | None = None
) -> list[tuple[str, bytes | Figure]]:
    """The captions and figures that a file names, or else the one that `draw` makes of its content."""
    named = {str(one.get("file")).rsplit("/", 1)[-1]: one.get("caption") for one in run.result.get("figures") or ()}
    found = [(str(text or name), run.pictures[name]) for name, text in named.items() if name in run.pictures]
    figure = draw(run.result) if draw and not found else None
    return found if figure is None else [(caption, figure)]


def outcome_values(run: Run) -> dict:
    """The best of what was measured."""
    if run.kind == "bench" and run.result is not None:
        return {"best": drafting(run.result["methods"])}
    return {"best": highest_tau(run.result)} if run.kind == "drafters" else {}
