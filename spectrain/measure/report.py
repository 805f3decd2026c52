"""The report page: each benchmark, training and throughput model is a section of facts, tables and figures.

`bench` writes the page of one benchmark, and `python -m spectrain.report` that of all runs in some folders. The page
holds its style and figures, and loads nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median

import pandas as pd
from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure
from pandas import DataFrame

from spectrain.config.fields import flat
from spectrain.decoding import Sampling
from spectrain.measure import plots, tables
from spectrain.measure.tables import fixed, interval, number, percent, table_of
from spectrain.methods.registry import BASELINE
from spectrain.models.kinds import about
from spectrain.stores.files import read_json, read_lines, read_yaml, write_whole
from spectrain.training.runs import hashed

GENERATOR = "spectrain.report"  # by it a page of ours is recognised
OPTIONS_SHOWN = 6
NOT_ENTERED = ("checkpoints", "metrics", "wandb", "__pycache__")
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass
class Section:
    """One part of the page."""

    title: str
    kind: str
    target: str = ""
    outcome: str = ""
    when: str = ""
    summary: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    parts: dict[str, DataFrame | Figure | None] = field(default_factory=dict)  # by title; None: nothing to show


@dataclass(frozen=True)
class Run:
    """A run folder."""

    name: str
    path: Path
    config: Mapping
    result: Mapping | None  # None: unfinished
    begun: Mapping = field(default_factory=dict)  # run.json

    @property
    def kind(self) -> str:
        return self.config["kind"]

    @property
    def options(self) -> dict[str, object]:
        """What changes the run, by dotted key."""
        return dict(flat(hashed(self.config)))


def write_report(path: Path, results: Mapping, rows: Sequence[Mapping]) -> None:
    """Write the page of one benchmark from its results.json and questions.jsonl."""
    title = f"Speculative decoding on {results.get('target', 'a target')}"
    write_whole(path, render(title, benchmark_sections(title, results, rows)))


def render(title: str, sections: Sequence[Section], left_out: Mapping[str, str] = {}, about: str = "") -> str:
    """Fill the template. `about` says what the page shows, `left_out` is what could not be read, with the reason."""
    template = environment().get_template("report.html")
    return template.render(
        title=title, sections=sections, left_out=left_out, about=about, generator=GENERATOR, cells=f"{tables.CELLS}."
    )


@cache
def environment() -> Environment:
    environment = Environment(loader=PackageLoader(__package__), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    numbers = itertools.count()
    environment.filters["svg"] = lambda figure: plots.svg(figure, f"f{next(numbers)}-")
    environment.filters["columns_of_words"] = tables.columns_of_words
    return environment


# Benchmarks


def benchmark_sections(title: str, results: Mapping, rows: Sequence[Mapping] = ()) -> list[Section]:
    """Describe a benchmark by its files, in one section per batch size; the first one compares them."""
    batches, sections = tables.batches_of(results), []
    for size, methods in batches.items():
        name = f"{title}, batch {size}" if len(batches) > 1 else title
        own = [row for row in rows if str(row.get("batch_size", size)) == size]
        sections.append(benchmark_section(name, {**results, "methods": methods, "batch_size": size}, own))
    compared = unless_empty(tables.batches_table(batches))
    sections[0].parts = {"Batch sizes and lengths of prompts": compared} | sections[0].parts
    return sections


def benchmark_section(title: str, results: Mapping, rows: Sequence[Mapping] = ()) -> Section:
    """Describe a benchmark by the content of results.json and questions.jsonl."""
    methods = results["methods"]
    own = [n for n in tables.ordered(methods) if n != BASELINE and methods[n].get("kind") != "peer"]
    fastest = next((name for name in own if number(methods[name].get("speedup"))), None)
    outcome, summary = "", []
    if fastest:
        best = methods[fastest]
        gain = interval(tables.estimate_of(best, "speedup"), 2)
        outcome = f"fastest: {fastest}, {gain} times plain decoding"
        tau = fixed(best.get("mean_accepted"), 2)
        faster = best["speedup"] > 1
        said = "The fastest method was" if faster else "No method was faster than plain decoding; next came"
        summary.append(f"{said} {fastest}: {gain} times plain decoding, tau {tau}.")
    idle = [name for name in own if methods[name].get("no_speedup")]
    if idle:
        summary.append(f"These drafted in fewer than 5 % of their steps, so they have no speedup: {', '.join(idle)}.")
    judged = [methods[name]["lossless"] for name in own if methods[name].get("lossless") is not None]
    if judged and all(judged):
        summary.append("Every method wrote the text of plain decoding, token by token.")
    warnings = [
        f"{name} wrote another text than plain decoding for {methods[name]['greedy_mismatches']} questions."
        for name in own
        if methods[name].get("lossless") is False
    ]
    warnings += [f"{name}: {one['warning']}" for name, one in methods.items() if one.get("warning")]
    warnings += tables.beside_others(methods)
    ran = [
        {"method": name, "ran": arm, "share of steps": percent(of.get("share"))}
        for name, one in methods.items()
        for arm, of in (one.get("ran") or {}).items()
    ]
    failures = Counter((row["method"], row["error"]) for row in rows if row.get("error"))
    failed = [{"method": name, "questions": str(n), "error": error} for (name, error), n in failures.most_common(20)]
    skipped = [{"method": name, "why": why} for name, why in (results.get("skipped") or {}).items()]
    return Section(
        title,
        "benchmark",
        str(results.get("target") or ""),
        outcome,
        str(results.get("date") or ""),
        summary,
        warnings,
        benchmark_facts(results),
        {
            "Results": tables.methods_table(methods),
            **plots.benchmark_figures(methods),
            "Speedup (and tau) by category": unless_empty(tables.categories_table(methods)),
            "Where drafted tokens came from": unless_empty(tables.sources_table(methods)),
            "Where the time after the prompt goes": unless_empty(tables.time_table(methods)),
            "What the steps ran": unless_empty(table_of(ran)),
            "Questions that failed": unless_empty(table_of(failed)),
            "Methods left out": unless_empty(table_of(skipped)),
        },
    )


def unless_empty(frame: DataFrame) -> DataFrame | None:
    return None if frame.empty else frame


def benchmark_facts(results: Mapping) -> dict[str, object]:
    """Collect what a reader needs to judge the numbers, or to repeat them."""
    sampling = {key: value for key, value in (results.get("sampling") or {}).items() if value is not None}
    versions = ", ".join(f"{name} {version}" for name, version in (results.get("versions") or {}).items())
    questions = f" ({results['questions']} questions)" if results.get("questions") else ""
    return {
        "prompts": f"{results.get('prompts') or ''}{questions}",
        "sampling": Sampling(**sampling).describe(),
        "batch size": results.get("batch_size"),
        "new tokens": results.get("max_new_tokens"),
        "nodes per step": results.get("max_nodes"),
        "verification": results.get("verification"),
        "seed": results.get("seed"),
        "device": results.get("device"),
        "CPU threads": results.get("threads"),
        "dtype": results.get("dtype"),
        "datastores": ", ".join(sorted(set((results.get("datastores") or {}).values()))),
        "versions": versions,
        "command": results.get("command"),
    }


# Trainings


def training_sections(runs: Sequence[Run]) -> list[Section]:
    """Describe trainings, in one section for each kind and target."""
    groups: dict[tuple, list[Run]] = {}
    for run in sorted(runs, key=lambda run: natural(run.name)):
        target = (run.config.get("target") or {}).get("path") or ""
        groups.setdefault((run.kind, str(target) if run.kind != "target" else ""), []).append(run)
    return [training_section(kind, target, found) for (kind, target), found in groups.items()]


def training_section(kind: str, target: str, runs: Sequence[Run]) -> Section:
    different, logged = differences(runs), {run.name: read_curve(run.path) for run in runs}
    rows, gammas, heads = [], {}, {}
    for run in runs:
        result = run.result or {}
        metrics = result.get("metrics") or (result if kind == "target" else {}) or last_validation(logged[run.name])
        steps = result.get("steps") or max(logged[run.name], default=-1) + 1
        asked = f" of {run.begun['steps']}" if run.result is None and "steps" in run.begun else ""
        row = {"run": run.name} | ({"what is different": different[run.name]} if len(runs) > 1 else {})
        row |= {"steps": f"{steps:,}{asked}", "tokens": fixed(result.get("tokens"), 0)}
        row |= {"held-out loss": fixed(metrics.get("eval/loss"), 3)}
        speeds, shares = (logged_values(logged[run.name], f"train/{name}") for name in ("tokens_per_s", "mfu"))
        row |= {"tokens/s": fixed(median(speeds), 0)} if speeds else {}
        row |= {"of peak FLOP/s": percent(median(shares), 0)} if shares else {}
        if "eval/alpha" in metrics:
            row["acceptance rate"] = fixed(metrics["eval/alpha"], 3)
        row |= {f"tau, {setting}": interval(one, 2) for setting, one in tau_of(run).items()}
        rows.append(row)
        for sampling, by_gamma in (result.get("gammas") or {}).items():
            gammas[sampling if len(runs) == 1 else f"{run.name}, {sampling}"] = by_gamma
        if result.get("reliability"):
            heads[run.name] = result["reliability"]
    known = [(number(one.get("value")), run.name) for run in runs for one in tau_of(run).values()]
    best = max((one for one in known if one[0]), default=None)
    unfinished = [run.name for run in runs if run.result is None]
    positions = [
        plots.Line(points, label=name, colour=colour)
        for (name, colour), points in zip(
            plots.colours_of(logged).items(), map(plots.alpha_by_position, logged.values()), strict=True
        )
        if points
    ]
    noun = about(kind).noun
    return Section(
        (f"{noun[0].upper()}{noun[1:]}" if len(runs) == 1 else f"{len(runs)} {noun}s")
        + (f" for {target}" * bool(target)),
        noun,
        target,
        f"highest tau: {best[0]:.2f}{f' ({best[1]})' if len(runs) > 1 else ''}" if best else "",
        max((a.get("started", "")[:10] for run in runs for a in run.begun.get("attempts") or ()), default=""),
        [f"Unfinished, with the numbers of the last validation so far: {', '.join(unfinished)}."] if unfinished else [],
        facts={f"command of {run.name}" if len(runs) > 1 else "command": run.begun.get("command") for run in runs}
        | ({"options": ", ".join(option_text(*one) for one in runs[0].options.items())} if len(runs) == 1 else {}),
        parts={
            "Results on held-out text": table_of(rows),
            "Curves": plots.curves(logged),
            "Acceptance by position in the draft": plots.positions_figure(positions),
            "Draft lengths": plots.tau_by_gamma(gammas),
            "Calibration of the acceptance head": plots.calibration(heads),
        },
    )


def tau_of(run: Run) -> Mapping[str, Mapping]:
    """Return tau of the drafter that a run trained, by setting; {} where none was measured."""
    return ((run.result or {}).get("tau") or {}).get(about(run.kind).method) or {}


def read_curve(folder: Path) -> dict[int, dict[str, float]]:
    """Read what a training logged: step -> metric -> value. A later attempt replaces the steps that it repeats."""
    files = sorted(folder.glob("metrics/version_*/metrics.csv"), key=lambda file: natural(file.parent.name))
    frames = [frame for file in files if not (frame := pd.read_csv(file)).empty]
    if not frames:
        return {}
    merged = pd.concat(frames).groupby("step").last().drop(columns="epoch", errors="ignore")
    return {int(step): row.dropna().to_dict() for step, row in merged.iterrows()}


def logged_values(curve: Mapping[int, Mapping], name: str) -> list[float]:
    return [row[name] for row in curve.values() if name in row]


def last_validation(curve: Mapping[int, Mapping]) -> dict[str, float]:
    return {name: value for row in curve.values() for name, value in row.items() if name.startswith("eval/")}


def differences(runs: Sequence[Run]) -> dict[str, str]:
    """Describe for each run the options in which it differs from most others."""
    found: dict[str, list[str]] = {run.name: [] for run in runs}
    for key in runs[0].options:
        usual, n = Counter(repr(run.options.get(key)) for run in runs).most_common(1)[0]
        for run in runs if n < len(runs) else ():
            if n <= len(runs) / 2 or repr(run.options.get(key)) != usual:
                found[run.name].append(option_text(key, run.options.get(key)))
    more = {
        name: f" and {len(one) - OPTIONS_SHOWN} more" if len(one) > OPTIONS_SHOWN else "" for name, one in found.items()
    }
    return {name: (", ".join(one[:OPTIONS_SHOWN]) + more[name]) or "as most" for name, one in found.items()}


def option_text(key: str, value: object) -> str:
    """Write an option as it is typed; local paths by their last part."""
    if value is None or isinstance(value, bool):
        return f"{key}={json.dumps(value)}"
    return f"{key}={Path(value).name if isinstance(value, str) and value.startswith((os.sep, '.')) else value}"


def natural(name: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts k_2 before k_10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


# Folders of runs


def sections_below(roots: Sequence[Path]) -> tuple[list[Section], dict[str, str]]:
    """Describe everything below some folders. Returns sections, and what could not be read with the reason."""
    sections: dict[Path, Section] = {}
    trainings, left_out = [], {}
    for folder in folders_below(roots):
        try:
            config = read_yaml(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
            if config.get("experiment"):
                trainings.append(read_run(folder, config, "result.json"))
            elif config.get("kind") == "bench":
                run = read_run(folder, config, "results.json")
                file = folder / "questions.jsonl"
                rows = list(read_lines(file)) if file.is_file() else []
                unfinished = Section(run.name, "benchmark", outcome=f"unfinished: {len(rows)} answers so far")
                found = benchmark_sections(run.name, run.result, rows) if run.result else [unfinished]
                sections |= {folder / str(number): one for number, one in enumerate(found)}
        except DAMAGED as error:
            left_out[str(folder)] = f"{type(error).__name__}: {error}".splitlines()[0]
    return [*training_sections(trainings), *sections.values()], left_out


def read_run(folder: Path, config: Mapping, result: str) -> Run:
    """Read a run folder, finished or not."""
    content = read_json(folder / result) if (folder / result).is_file() else None
    begun = read_json(folder / "run.json") if (folder / "run.json").is_file() else {}
    return Run(folder.resolve().name, folder, config, content, begun)


def folders_below(roots: Sequence[Path]) -> list[Path]:
    """Return the folders and all below them, in the order of their names, without hidden ones and parts of runs."""
    found = {}
    for root in roots:
        for folder, inner, _ in os.walk(root):
            inner[:] = sorted((n for n in inner if not n.startswith(".") and n not in NOT_ENTERED), key=natural)
            found[Path(folder).resolve()] = Path(folder)
    return list(found.values())
