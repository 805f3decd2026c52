"""One page for a folder of runs: what was trained and measured, for a reader who has not seen the project.

Sections follow one another from the whole to the details; what is long is folded. Whatever a run lacks is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from spectrain.measure.results import BASELINE
from spectrain.reporting.bench_page import GLOSSARY, describe_sampling, facts_of, main_table, more_parts, opening
from spectrain.reporting.bench_table import is_peer, lossless_text
from spectrain.reporting.formats import MISSING, count, fixed, number, whole, with_half_width
from spectrain.reporting.found_runs import Benchmark, Found, Measurement, Run, Training, groups, natural
from spectrain.reporting.measurement_report import TITLES, measurement_parts, outcome
from spectrain.reporting.page import Markup, definitions, filled, folded, heading, link, note, page, table
from spectrain.reporting.plots import ordered
from spectrain.reporting.training_report import overview, training_section
from spectrain.reporting.tune_report import tuning_parts

GENERATOR = "spectrain.report"  # by it a page of ours is known again
MANY = 12  # commands: so many are folded
FEW = 3  # benchmarks: the details of so many stand open
WORDS = {
    "target": "the language model that is to write faster; what it writes, or the distribution it draws from, is kept",
    "drafter": "what guesses the target's next tokens cheaply: a small model, a head, a table of what was read before",
    "draft": "the guessed tokens; the target checks all of them in one forward and keeps those it accepts",
    "tau": "tokens that one forward of the target yields on average, its own token included; without a drafter it is 1",
    "alpha": "probability that the target accepts a drafted token; 1 would mean that every guess is kept",
    "lossless": "the text is what the target alone would have written (greedy), or has the same distribution (sampled)",
    "speedup": "tokens a second divided by those of the target alone, in the same run; below 1 drafting costs time",
    "interval": "[low, high] or ±: where the value lies with 95 % confidence, by resampling n texts; "
    "two values whose intervals overlap much are not told apart",
}
STYLE = """
nav ul { margin: .2rem 0; padding-left: 1.2rem; columns: 2; font-size: .92rem; }
h2 { border-top: 1px solid #ccc; padding-top: .8rem; } h3 { font-size: 1.02rem; margin: 1.4rem 0 .3rem; }
h4 { font-size: .95rem; margin: 1.1rem 0 .3rem; } a { color: #00558c; }
details { margin: .4rem 0; } summary { cursor: pointer; color: #00558c; }
details > :not(summary) { margin-left: .9rem; }
pre { background: #f6f6f6; padding: .5rem .7rem; font-size: .78rem; columns: 22rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
dl { grid-template-columns: minmax(min-content, max-content) 1fr; } dt { max-width: 22rem; overflow-wrap: anywhere; }
img { max-width: min(100%, 50rem); height: auto; } code { overflow-wrap: anywhere; }
th { max-width: 11rem; overflow-wrap: break-word; } th small { white-space: normal; }
th.left, td.left, td.wrap { text-align: left; }
td.wrap { white-space: normal; min-width: 14rem; overflow-wrap: anywhere; }
table.heat td, table.heat th { min-width: 0; width: 3.4rem; text-align: center; border: 1px solid #fff; }
@media print { body { max-width: none; padding: 0; font-size: 11px; } * { print-color-adjust: exact; }
  td { white-space: normal; } tr, figure { break-inside: avoid; } th:first-child, td:first-child { position: static; } }
"""


@dataclass(frozen=True)
class Section:
    """A part of the page that its table of contents names."""

    title: str
    html: str
    inner: Sequence[tuple[str, str]] = ()  # (title, anchor) of what stands within


@dataclass(frozen=True)
class About:
    """What the page says of itself."""

    title: str
    sources: Sequence[str]  # folders that were looked through
    date: str
    command: str


def render_page(found: Found, about: About) -> str:
    """The whole page; what cannot be shown is listed at its end."""
    unreadable = dict(found.unreadable)
    sections = [
        _overview(found, unreadable),
        *_training_sections(found.trainings, unreadable),
        _benchmarks(found.benchmarks, unreadable),
        _tunings(found, unreadable),
        *_measurements(found.measurements, unreadable),
        _provenance(found.all()),
        _commands(found.all()),
        _left_out(unreadable),
    ]
    sections = [section for section in sections if section is not None]
    body = [
        f'<h2 id="s{i}">{escape(section.title)}</h2>{section.html}'
        for i, section in enumerate(sections)
        if section.html
    ]
    return page(
        about.title,
        [heading(about.title, 1), _introduction(found, about), _contents(sections), *body],
        STYLE,
        GENERATOR,
    )


def _introduction(found: Found, about: About) -> str:
    """What the page is, and what its words mean."""
    unfinished = sum(run.result is None for run in found.trainings)
    still = f" ({unfinished} unfinished)" if unfinished else ""
    parts = [count(len(found.trainings), "training") + still] * bool(found.trainings)
    parts += [count(len(found.benchmarks), "benchmark")] * bool(found.benchmarks)
    parts += [count(len(found.tunings), "tuning run")] * bool(found.tunings)
    parts += [count(len(found.measurements), "other measurement")] * bool(found.measurements)
    told = (
        "Speculative decoding makes a language model write faster without changing what it writes: a cheap drafter "
        "guesses the next tokens, and the model, the target, checks all guesses in one forward. This page shows the "
        f"drafters that were trained and what they gained: {', '.join(parts)}, found on {about.date} in "
        f"{', '.join(about.sources)}. It needs no network and nothing else."
    )
    return f"<p>{escape(told)}</p>{definitions(WORDS.items())}{note(f'Written by {about.command}')}"


def _contents(sections: Sequence[Section]) -> str:
    lines = []
    for i, section in enumerate(sections):
        inner = "".join(f"<li>{link(title, anchor)}</li>" for title, anchor in section.inner)
        lines.append(f"<li>{link(section.title, f's{i}')}{f'<ul>{inner}</ul>' if inner else ''}</li>")
    return f"<nav><h2>Contents</h2><ul>{''.join(lines)}</ul></nav>"


def _overview(found: Found, unreadable: dict[str, str]) -> Section:
    """Every run in a line."""
    parts = []
    if found.trainings:
        parts += [heading("Trained", 3), overview(found.trainings)]
    others = [*found.benchmarks, *found.tunings, *found.measurements]
    if others:
        lines = []
        for run in others:
            facts = run.facts
            cells = [
                (link(run.name, run.anchor), "left"),
                (_kind(run), "left"),
                (run.target or MISSING, "left"),
                (_guarded(run, lambda run=run: _outcome(run), unreadable) or MISSING, "left"),
            ]
            cells += [(str(facts.get("date") or run.seen or MISSING), ""), (_device(run), "wrap")]
            lines.append(("", cells))
        heads = ["run", "kind", "target", "outcome", "when", "where"]
        parts += [heading("Measured", 3), table(heads, lines)]
    return Section("Overview", "".join(parts))


def _kind(run: Run) -> str:
    return TITLES.get(run.kind, {"bench": "benchmark", "tune": "tuning"}.get(run.kind, run.kind))


def _device(run: Run) -> str:
    """What it was measured on, or for a model of throughput, of what hardware."""
    device = run.facts.get("device")
    if device in (None, "auto"):
        modelled = (run.facts.get("hardware") or {}).get("name")
        known = (run.facts.get("versions") or {}).get("devices") or [f"{modelled} (modelled)"] * bool(modelled)
        device = ", ".join(map(str, known)) or device
    return str(device or MISSING)


def _outcome(run: Run) -> str:
    """A benchmark's fastest method; of others, whether they have ended."""
    if isinstance(run, Measurement):
        return outcome(run) or MISSING
    if isinstance(run, Benchmark):
        if run.results is None:
            return f"unfinished: {count(len(run.rows), 'answer')} so far"
        methods = run.results["methods"]
        own = [name for name in ordered(methods) if name != BASELINE and not is_peer(methods[name])]
        timed = [name for name in own if number(methods[name].get("speedup")) is not None]
        if not timed:
            return MISSING
        best = methods[timed[0]]
        return f"fastest: {timed[0]}, {with_half_width(best, 'speedup', 2)} times autoregressive"
    return "unfinished" if run.result is None else "finished"


def _training_sections(trainings: Sequence[Training], unreadable: dict[str, str]) -> list[Section]:
    found = []
    for i, runs in enumerate(groups(trainings).values()):
        shown = _guarded(runs[0], lambda runs=runs, i=i: training_section(runs, i), unreadable)
        found += [Section(*shown)] if shown else []
    return found


def _benchmarks(benchmarks: Sequence[Benchmark], unreadable: dict[str, str]) -> Section | None:
    """All methods of all benchmarks side by side, then each benchmark."""
    if not benchmarks:
        return None
    finished = sorted((run for run in benchmarks if run.results), key=lambda run: natural(run.name))
    parts, inner = [_side_by_side(finished)] if len(finished) > 1 else [], []
    for i, run in enumerate(finished):
        html = _guarded(run, lambda run=run, i=i: _benchmark(run, f"b{i}-", len(finished) <= FEW), unreadable)
        if html:
            parts.append(f"{heading(run.name, 3, run.anchor)}{html}")
            inner.append((run.name, run.anchor))
    for run in benchmarks:
        if run.results is None:
            written = f"unfinished, {count(len(run.rows), 'answer')} so far; last written {run.seen}."
            parts.append(heading(run.name, 3, run.anchor) + note(written[0].upper() + written[1:]))
    known = folded("What the measures mean", definitions(GLOSSARY.items()))
    return Section("Benchmarks", "".join([known, *parts]), inner)


def _benchmark(run: Benchmark, prefix: str, is_open: bool) -> str:
    results = run.results
    short = opening(results) + main_table(results["methods"])
    more = "".join([facts_of(results), *more_parts(results, run.rows, 4, prefix)])
    return short + folded("Plots (speedup, acceptance by position and by source, time), settings", more, is_open)


def _side_by_side(benchmarks: Sequence[Benchmark]) -> str:
    """Methods down, benchmarks across: speedup, and below it tau."""
    names = sorted({name for run in benchmarks for name in run.results["methods"]})
    names = [BASELINE] * (BASELINE in names) + [name for name in names if name != BASELINE]
    lines = []
    for name in names:
        cells = [(name, "left")]
        for run in benchmarks:
            one = run.results["methods"].get(name)
            speedup, tau = (
                (MISSING, "") if one is None else (_speedup(one), f"tau {fixed(one.get('mean_accepted'), 2)}")
            )
            differs = one is not None and lossless_text(one).startswith("no")
            cells.append((f"{speedup}\n{tau}" if tau else speedup, "bad" if differs else ""))
        lines.append(("baseline" if name == BASELINE else "", cells))
    heads = ["method", *(f"{run.name}\n{describe_sampling(run.results.get('sampling') or {})}" for run in benchmarks)]
    told = note(
        "Speedup over autoregressive decoding, higher is better, ± half of its 95 % interval, and below it tau. Each "
        "column is a benchmark of its own, with its own prompts; red: greedy text differed from the target's own."
    )
    return heading("Side by side", 3) + told + table(heads, lines)


def _speedup(one: Mapping) -> str:
    return with_half_width(one, "speedup", 2)


def _tunings(found: Found, unreadable: dict[str, str]) -> Section | None:
    if not found.tunings:
        return None
    parts = [_guarded(run, lambda run=run: "".join(tuning_parts(run)), unreadable) for run in found.tunings]
    return Section("Tuning", "".join(part for part in parts if part))


def _measurements(measurements: Sequence[Measurement], unreadable: dict[str, str]) -> list[Section]:
    """A section a kind."""
    found = []
    for kind, title in TITLES.items():
        own = [(i, run) for i, run in enumerate(measurements) if run.kind == kind]
        parts = [
            _guarded(run, lambda run=run, i=i: "".join(measurement_parts(run, f"m{i}-")), unreadable) for i, run in own
        ]
        html = "".join(part for part in parts if part)
        found += [Section(title, html)] if html else []
    return found


def _guarded(run: Run, make: Callable, unreadable: dict[str, str]):
    """What `make` gives, or None where the run's files hold something else than they should."""
    try:
        return make()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        unreadable[str(run.folder)] = f"its results are not as expected ({type(error).__name__}: {error})"
        return None


def _provenance(runs: Sequence[Run]) -> Section:
    """Hardware, versions and code of every run."""
    lines = []
    for run in runs:
        last = run.attempts[-1] if run.attempts else {}
        environment, code = last.get("environment") or run.facts.get("versions") or {}, last.get("code") or {}
        commit = str(code.get("commit") or "")[:10]
        changed = "\nwith changes" if code.get("dirty") else ""
        devices = ", ".join(map(str, environment.get("devices") or [])) or _device(run)
        threads = whole(run.facts, "threads")
        more = f", {count(threads, 'CPU thread')}" if threads else ""
        cells = [(run.name, "left"), (f"{devices}{more}", "left")]
        cells += [(str(environment.get("host") or MISSING), "left"), (str(environment.get("ranks") or MISSING), "")]
        cells += [(str(environment.get(name) or MISSING), "") for name in LIBRARIES]
        cells += [(f"{commit}{changed}" if commit else MISSING, ""), (str(len(run.attempts) or MISSING), "")]
        lines.append(("", cells))
    heads = ["run", "devices", "host", "ranks", *LIBRARIES, "git commit", "attempts"]
    told = note(
        "Of the last attempt, where a run was interrupted and went on. With changes: files differed from that commit."
    )
    return Section("Hardware, versions, code", told + table(*filled(heads, lines)))


LIBRARIES = ("spectrain", "torch", "lightning", "transformers", "python")


def _commands(runs: Sequence[Run]) -> Section | None:
    known = [run for run in runs if run.command]
    if not known:
        return None
    told = note(
        "Benchmarks and measurements keep the command that was typed. For trainings and tuning runs the command is "
        "put together from the options in their config.yaml; options with today's default are left out."
    )
    rows = definitions((run.name, Markup(f"<code>{escape(str(run.command))}</code>")) for run in known)
    return Section("Commands", told + (folded(f"All {len(known)} commands", rows) if len(known) > MANY else rows))


def _left_out(unreadable: Mapping[str, str]) -> Section | None:
    if not unreadable:
        return None
    lines = [("", [(path, "wrap"), (why, "wrap")]) for path, why in unreadable.items()]
    return Section("Files left out", table(["file or folder", "why"], lines))
