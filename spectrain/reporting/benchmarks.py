"""A benchmark's results for its readers: a table for the terminal, and what its page shows.

Both take the content of `results.json`. Whatever is missing there, null or not finite is shown as a dash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pandas import DataFrame
from rich.table import Table

from spectrain.measure.results import BASELINE
from spectrain.reporting.drawing import COLOURS, GREY
from spectrain.reporting.formats import MISSING, count, fixed, measured, number, percent, plus_minus, size, whole
from spectrain.reporting.plots import benchmark_plots, categories_of, ordered
from spectrain.reporting.tables import Marked, for_terminal, table_of

FAILURES_SHOWN = 20
QUESTIONS_SHOWN = 24  # with the methods that drafted their steps
OF_TERMINAL = ["method", "answers", "tau", "tokens/s", "speedup", "accepted share", "lossless"]  # fit into 80 columns
OF_WIDE_TERMINAL = [*OF_TERMINAL[:5], "outside forward", "accepted share", "retrieval hits", "lossless"]  # into 100


def terminal_table(results: Mapping, width: int = 100) -> Table:
    """The results as a table for a terminal of `width` columns; what failed or was skipped stands below it."""
    methods = results["methods"]
    frame = methods_table(methods).reindex(columns=OF_WIDE_TERMINAL if width >= 100 else OF_TERMINAL)
    frame["method"] = [f"{name}*" if is_baseline(methods[name]) else name for name in frame.index]
    for column in ("tokens/s", "speedup"):
        frame[column] = [cell.partition(" ±")[0] for cell in frame[column]]
    failed = {name: whole(one, "errors") for name, one in methods.items()}
    whose = whose_baselines(methods)
    notes = [f"* baseline: {whose} own generation"] if whose else []
    notes += [f"{name}: {count(n, 'question')} failed" for name, n in failed.items() if n]
    notes += [f"{name}: {one['warning']}" for name, one in methods.items() if one.get("warning")]
    notes += [f"skipped {name}: {reason}" for name, reason in (results.get("skipped") or {}).items()]
    return for_terminal(frame, notes, dim=BASELINE)


def benchmark_parts(results: Mapping, rows: Sequence[Mapping], prefix: str = "") -> dict:
    """What the templates show of a benchmark: the content of results.json and questions.jsonl.

    `prefix` starts the ids within its plots, where a page shows several benchmarks.
    """
    methods = results["methods"]
    own = drafting(methods)
    judged = [name for name in own if isinstance(methods[name].get("lossless"), bool)]
    unjudged = [name for name, one in methods.items() if not isinstance(one.get("lossless"), bool)]
    timed = [name for name in own if number(methods[name].get("speedup")) is not None]
    counts = Counter((row["method"], row["error"]) for row in rows if row.get("error"))
    return {
        "results": results,
        "own": own,
        "n_baselines": sum(map(is_baseline, methods.values())),
        "whose_baselines": whose_baselines(methods),
        "best": timed[0] if timed else None,
        "timed": len(timed),
        "faster": sum(methods[name]["speedup"] > 1 for name in timed),
        "judged": judged,
        "differ": {name: whole(methods[name], "greedy_mismatches") for name in judged if not methods[name]["lossless"]},
        "may_differ": {name: n for name in unjudged if (n := whole(methods[name], "greedy_mismatches"))},
        "asked": max((whole(m, "questions") + whole(m, "errors") for m in methods.values()), default=0),
        "table": methods_table(methods),
        "names": {name: shown_name(name, methods[name]) for name in ordered(methods)},
        "categories": {
            c: max(whole((one.get("by_category") or {}).get(c) or {}, "questions") for one in methods.values())
            for c in categories_of(methods)
        },
        "choices": {name: one for name in methods if (one := choices_of(rows, name))},
        "plots": benchmark_plots(results, rows, prefix),
        "failures": counts.most_common(FAILURES_SHOWN),
        "more_failures": max(0, len(counts) - FAILURES_SHOWN),
    }


def choices_of(rows: Sequence[Mapping], name: str) -> dict | None:
    """What a method of a benchmark chose in its first questions, where it chose among several methods that draft.

    `colours`: by method; `questions`: the choices of each, by its id.
    """
    own = [row for row in rows if row["method"] == name and row.get("choices")]
    drafting = {one["method"] for row in own for one in row["choices"]} - {BASELINE}
    if len(drafting) < 2:
        return None
    colours = {BASELINE: GREY} | dict(zip(sorted(drafting), COLOURS, strict=False))
    return {"colours": colours, "questions": [(row["question_id"], row["choices"]) for row in own[:QUESTIONS_SHOWN]]}


def methods_table(methods: Mapping[str, Mapping]) -> DataFrame:
    """One row per method, fastest first."""
    return table_of((method_row(name, methods[name]) for name in ordered(methods)), ordered(methods))


def method_row(name: str, one: Mapping) -> dict[str, str]:
    answered, failed = whole(one, "questions"), whole(one, "errors")
    texts = {True: "yes", False: Marked(f"no ({whole(one, 'greedy_mismatches')})")}
    drafted, accepted = number(one.get("drafted")), number(one.get("accepted"))
    forward = number((one.get("time_share") or {}).get("forward"))
    return {
        "method": shown_name(name, one),
        "answers": Marked(f"{answered}/{answered + failed}") if failed else str(answered),
        "tau": plus_minus(measured(one, "mean_accepted"), 2),
        "tokens/s": plus_minus(measured(one, "tokens_per_s_micro"), 1),
        "speedup": plus_minus(measured(one, "speedup"), 2),
        "lossless": "reference" if name == BASELINE else texts.get(one.get("lossless"), MISSING),
        "outside forward": percent(None if forward is None else 1.0 - forward),
        "accepted share": percent(accepted / drafted if drafted and accepted is not None else None),
        "retrieval hits": percent(one.get("retrieval_hit_rate")),
        "discarded per token": fixed(one.get("discard_rate"), 2),
        "forwards per token": fixed(one.get("verification_rate"), 2),
        "tokens/s by question": fixed(one.get("tokens_per_s_macro"), 1),
        "peak memory": size(one.get("peak_memory_bytes")),
    }


def drafting(methods: Mapping[str, Mapping]) -> list[str]:
    """Our own methods that draft, fastest first."""
    return [name for name in ordered(methods) if name != BASELINE and not is_baseline(methods[name])]


def is_baseline(one: Mapping) -> bool:
    """Whether a method is another engine's own generation, which results.json calls a peer."""
    return one.get("kind") == "peer"


def whose_baselines(methods: Mapping[str, Mapping]) -> str:
    """Whose generation the baselines are, such as "Hugging Face's"; empty if there are none."""
    names = [name for name, one in methods.items() if is_baseline(one)]
    engines = {"llama.cpp's" if name.startswith("llama_cpp") else "Hugging Face's" for name in names}
    return " and ".join(sorted(engines))


def shown_name(name: str, one: Mapping) -> str:
    return f"{name} (baseline)" if is_baseline(one) else name
