"""The report page: each benchmark is a section of facts, tables and bars.

`bench` writes the page of one benchmark, and `python -m spectrain.report` that of all benchmarks in some folders. The
page holds its style, and loads nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader
from pandas import DataFrame

from spectrain.config import read_yaml
from spectrain.decoding import Sampling
from spectrain.measure import tables
from spectrain.measure.tables import fixed, interval, number, percent, table_of
from spectrain.methods.registry import BASELINE
from spectrain.stores.files import read_json, read_lines, write_whole

GENERATOR = "spectrain.report"  # by it a page of ours is recognised
Bar = tuple[str, str, float]  # a name, what stands behind the bar, and its length in percent of the longest
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass
class Section:
    """One part of the page."""

    title: str
    target: str = ""
    outcome: str = ""
    when: str = ""
    summary: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    parts: dict[str, DataFrame | list[Bar]] = field(default_factory=dict)  # by title; empty ones are not shown


def write_report(path: Path, results: Mapping, rows: Sequence[Mapping]) -> None:
    """Write the page of one benchmark from its results.json and questions.jsonl."""
    title = f"Speculative decoding on {results.get('target', 'a target')}"
    write_whole(path, render(title, benchmark_sections(title, results, rows)))


def render(title: str, sections: Sequence[Section], left_out: Mapping[str, str] = {}, about: str = "") -> str:
    """Fill the template. `about` says what the page shows, `left_out` is what could not be read, with the reason."""
    template = environment().get_template("report.html")
    return template.render(
        title=title, sections=sections, left_out=left_out, about=about, generator=GENERATOR, cells=tables.cells()
    )


@cache
def environment() -> Environment:
    environment = Environment(loader=PackageLoader(__package__), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["columns_of_words"] = tables.columns_of_words
    return environment


def benchmark_sections(title: str, results: Mapping, rows: Sequence[Mapping] = ()) -> list[Section]:
    """Describe a benchmark by its files, in one section per batch size; the first one compares them."""
    batches, sections = tables.batches_of(results), []
    for size, methods in batches.items():
        name = f"{title}, batch {size}" if len(batches) > 1 else title
        own = [row for row in rows if str(row.get("batch_size", size)) == size]
        sections.append(benchmark_section(name, {**results, "methods": methods, "batch_size": size}, own))
    compared = {"Batch sizes and lengths of prompts": tables.batches_table(batches)}
    sections[0].parts = compared | sections[0].parts
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
        str(results.get("target") or ""),
        outcome,
        str(results.get("date") or ""),
        summary,
        warnings,
        benchmark_facts(results),
        {
            "Results": tables.methods_table(methods),
            "Speedup over plain decoding": speedup_bars(methods),
            "Acceptance by position in the draft": tables.positions_table(methods),
            "Speedup (and tau) by category": tables.categories_table(methods),
            "Where drafted tokens came from": tables.sources_table(methods),
            "Where the time after the prompt goes": tables.time_table(methods),
            "What the steps ran": table_of(ran),
            "Questions that failed": table_of(failed),
            "Methods left out": table_of(skipped),
        },
    )


def speedup_bars(methods: Mapping[str, Mapping]) -> list[Bar]:
    """Return a bar for each method; none where no speedup was measured."""
    gains = {name: number(methods[name].get("speedup")) or 0.0 for name in tables.ordered(methods)}
    most = max(gains.values())
    return [(name, tables.speedup_of(methods[name]), 100 * gain / most) for name, gain in gains.items() if most]


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


def sections_below(roots: Sequence[Path]) -> tuple[list[Section], dict[str, str]]:
    """Describe the benchmarks below some folders. Returns sections, and what could not be read with the reason."""
    sections, left_out = [], {}
    files = {file.resolve(): file for root in roots for file in sorted(root.rglob("config.yaml"))}
    for file, folder in ((file, file.parent) for file in files.values()):
        try:  # a killed process may have left a hidden folder beside a run
            if folder.name.startswith(".") or read_yaml(file).get("kind") != "bench":
                continue
            name, answers, result = folder.resolve().name, folder / "questions.jsonl", folder / "results.json"
            rows = list(read_lines(answers)) if answers.is_file() else []
            if result.is_file():
                sections += benchmark_sections(name, read_json(result), rows)
            else:
                sections.append(Section(name, outcome=f"unfinished: {len(rows)} answers so far"))
        except DAMAGED as error:
            left_out[str(folder)] = f"{type(error).__name__}: {error}".splitlines()[0]
    return sections, left_out
