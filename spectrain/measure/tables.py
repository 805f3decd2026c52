"""Tables of results for the terminal and the report page, and how numbers are written in them.

Every table is a DataFrame of text. Functions take the content of JSON files; what is missing, null or not finite there
is a dash. An estimate is {"value", "low", "high"}, with the bounds of its 95 % interval.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from pandas import DataFrame
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from spectrain.config import papers
from spectrain.measure.results import CONTEXTS, DID_NOT_DRAFT, LONGER
from spectrain.methods.registry import BASELINE
from spectrain.planning.plan import Machine, Plan
from spectrain.stores.environment import is_disturbed
from spectrain.terminal import result_console

MISSING = "–"
MAX_POSITIONS = 16
NUMBER = re.compile(rf"[-+]?[\d.]|{MISSING}|did not|$")  # how a cell begins that is no word
STAGES = ("forward", "draft", "verify", "commit", "other")
NARROW_TERMINAL = ["method", "answers", "tau", "tokens/s", "speedup", "acceptance", "lossless"]  # fit into 80 columns
OF_GPU = ["ms outside forward", "read per step", "of limit"]


def number(value: object) -> float | None:
    """Return the value where it is a finite number, else None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def fixed(value: object, digits: int) -> str:
    value = number(value)
    return MISSING if value is None else f"{value:,.{digits}f}"


def percent(value: object, digits: int = 1) -> str:
    value = number(value)
    return MISSING if value is None else f"{100 * value:.{digits}f} %"


def size(value: object) -> str:
    """Write bytes in MiB or GiB."""
    value = number(value)
    if not value:
        return MISSING
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def estimate_of(one: Mapping, measure: str) -> dict:
    """Return a measure of results.json, which keeps the interval of `tau` under `tau_ci95`, as an estimate."""
    low, high = one.get(f"{measure}_ci95") or (None, None)
    return {"value": one.get(measure), "low": low, "high": high}


def interval(one: Mapping | None, digits: int) -> str:
    """Write an estimate as "2.50 [2.40, 2.61]"; only the value where the interval is unknown."""
    value, *bounds = (number((one or {}).get(key)) for key in ("value", "low", "high"))
    text = fixed(value, digits)
    if value is None or None in bounds:
        return text
    return f"{text} [{', '.join(fixed(bound, digits) for bound in bounds)}]"


def plus_minus(one: Mapping | None, digits: int) -> str:
    """Write an estimate as "2.50 ± 0.10", half the width of its interval."""
    value, low, high = (number((one or {}).get(key)) for key in ("value", "low", "high"))
    text = fixed(value, digits)
    return text if None in (value, low, high) else f"{text} ± {(high - low) / 2:.{digits}f}"


def table_of(rows: Iterable[Mapping[str, object]], names: Sequence[str] | None = None) -> DataFrame:
    """Make a table of rows of text by column; missing cells become dashes. `names` tell rows from one another."""
    frame = DataFrame(list(rows), index=names, dtype=object)
    return frame.where(frame.notna(), MISSING)


def columns_of_words(frame: DataFrame) -> list[str]:
    """Return the columns that are aligned to the left: the first, and those that hold a word."""
    return [name for i, name in enumerate(frame) if i == 0 or not all(NUMBER.match(str(cell)) for cell in frame[name])]


def for_terminal(frame: DataFrame, notes: Sequence[str] = (), dim: str | None = None) -> Table:
    """Make a table for the terminal in which only the first column is folded; the row named `dim` stands back."""
    table = Table(caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    words = columns_of_words(frame)
    for i, name in enumerate(frame):
        first = {"overflow": "fold", "min_width": 8} if i == 0 else {"no_wrap": True}
        table.add_column(Text(name.replace(" ", "\n")), justify="left" if name in words else "right", **first)
    for label, *cells in frame.itertuples(name=None):
        table.add_row(*(Text(str(cell)) for cell in cells), style="dim" if label == dim else None)
    table.caption = Text("\n".join(notes)) if notes else None
    return table


def show(parts: Iterable[tuple[str, DataFrame]], columns: int = 100) -> None:
    """Print titles and tables, `columns` wide where the output is no terminal."""
    console = result_console(columns)
    for title, frame in parts:
        console.print(title, soft_wrap=True)
        console.print(for_terminal(frame), "")


# A benchmark: `methods` is that of results.json.


def ordered(methods: Mapping[str, Mapping]) -> list[str]:
    """Return the names of methods, fastest first; those without a speedup are last."""
    return sorted(methods, key=lambda name: -(number(methods[name].get("speedup")) or 0.0))


def methods_table(methods: Mapping[str, Mapping]) -> DataFrame:
    """Make a table with one row per method, fastest first. On a GPU the time outside the forward is in milliseconds."""
    names = ordered(methods)
    frame = table_of((method_row(name, methods[name]) for name in names), names)
    on_gpu = any(number(one.get("outside_forward_ms")) is not None for one in methods.values())
    return frame.drop(columns="outside forward" if on_gpu else OF_GPU)


def speedup_of(one: Mapping) -> str:
    return one.get("no_speedup") or interval(estimate_of(one, "speedup"), 2)


def method_row(name: str, one: Mapping) -> dict[str, str]:
    answered, failed = one.get("questions") or 0, one.get("errors") or 0
    drafted, accepted = number(one.get("drafted")), number(one.get("accepted"))
    forward = number((one.get("time_share") or {}).get("forward"))
    lossless = {True: "yes", False: f"no ({one.get('greedy_mismatches')})"}.get(one.get("lossless"), MISSING)
    return {
        "method": name + (" (baseline)" if one.get("kind") == "peer" else ""),
        "answers": f"{answered}/{answered + failed}" if failed else str(answered),
        "tau": plus_minus(estimate_of(one, "mean_accepted"), 2),
        "tokens/s": plus_minus(estimate_of(one, "tokens_per_s_micro"), 1),
        "speedup": speedup_of(one),
        "acceptance": percent(accepted / drafted if drafted and accepted is not None else None),
        "outside forward": percent(None if forward is None else 1.0 - forward),
        "retrieval hits": percent(one.get("retrieval_hit_rate")),
        "lossless": "reference" if name == BASELINE else lossless,
        "peak memory": size(one.get("peak_memory_bytes")),
        "ms outside forward": fixed(one.get("outside_forward_ms"), 2),
        "read per step": size(one.get("bytes_per_step")),
        "of limit": percent(one.get("bandwidth_share"), 0),
    }


def batches_of(results: Mapping) -> dict[str, Mapping[str, Mapping]]:
    """Return `methods` of each batch size, of which results.json may have one or several."""
    return results.get("by_batch") or {str(results.get("batch_size", 1)): results["methods"]}


def terminal_tables(results: Mapping, width: int = 100) -> list[Table]:
    """Make the tables of a benchmark for a terminal: of each batch size, and of all of them if there is more to see."""
    batches = batches_of(results)
    tables = [
        terminal_table({**results, "methods": methods}, width, f"batch {size}" if len(batches) > 1 else None)
        for size, methods in batches.items()
    ]
    compared = batches_table(batches)
    return tables if compared.empty else [*tables, for_terminal(compared, [cells()])]


def terminal_table(results: Mapping, width: int = 100, title: str | None = None) -> Table:
    """Make the table of one batch size for a terminal; what failed or was skipped is listed below it."""
    methods = results["methods"]
    frame = methods_table(methods)
    of_gpu = [name for name in OF_GPU if name in frame]
    wide = [*(name for name in NARROW_TERMINAL if name != "answers"), *of_gpu] if of_gpu else list(frame)[:9]
    frame = frame[wide if width >= 100 else NARROW_TERMINAL]
    for column in ("tokens/s", "speedup"):
        frame[column] = ["did not\ndraft" if c == DID_NOT_DRAFT else c.split(" ")[0] for c in frame[column]]
    notes = [f"{name}: {n} failed" for name, one in methods.items() if (n := one.get("errors"))]
    notes += [f"{name}: {one['warning']}" for name, one in methods.items() if one.get("warning")]
    notes += [
        f"{name}: {way} in {percent(of['share'], 0)} of its steps, the faster one"
        for name, one in methods.items()
        for way, of in ((one.get("ran") or {}) if one.get("kind") == "peer" else {}).items()
    ]
    notes += beside_others(methods)
    notes += [f"skipped {name}: {reason}" for name, reason in (results.get("skipped") or {}).items()]
    table = for_terminal(frame, notes, dim=BASELINE)
    table.title, table.title_justify = title, "left"
    return table


def beside_others(methods: Mapping[str, Mapping]) -> list[str]:
    """Say which methods were timed while other processes worked, in one sentence; none where none was."""
    shares = {name: number(one.get("other_work")) for name, one in methods.items()}
    found = [f"{name} {percent(share, 0)}" for name, share in shares.items() if is_disturbed(share)]
    return [f"timed beside other work, which took this much of the processor's time: {', '.join(found)}"] * bool(found)


def cells() -> str:
    """Say what stands in the cells of `batches_table`."""
    said = "Tokens/s by length of the prompt, and in brackets the speedup over plain decoding at the same batch size."
    return f"{said} In papers: {'; '.join(papers.speedups()[0])}."


def batches_table(batches: Mapping[str, Mapping[str, Mapping]]) -> DataFrame:
    """Make a table of tokens/s and speedup, one row per method and batch size, one column per length of the prompts.

    It is empty where there is one of each.
    """
    there = {c for methods in batches.values() for one in methods.values() for c in one.get("by_context") or {}}
    contexts, rows = [c for c in (*map(str, CONTEXTS), LONGER) if c in there], []
    if len(batches) * len(contexts) <= 1:
        return table_of([])
    _, of_papers = papers.speedups()
    for name in next(iter(batches.values())):
        for size, methods in batches.items():
            row = {"method": name, "batch": size}
            for context in contexts:
                one = (methods[name].get("by_context") or {}).get(context) or {}
                gain = one.get("no_speedup") or fixed(one.get("speedup"), 2)
                title = f"over {CONTEXTS[-1]:,} tokens" if context == LONGER else f"to {int(context):,} tokens"
                row[title] = f"{fixed(one['tokens_per_s_micro'], 0)} ({gain})" if one else MISSING
            rows.append(row | {"in its paper": of_papers.get(name, {}).get(int(size), MISSING)})
    return table_of(rows)


def sources_table(methods: Mapping[str, Mapping]) -> DataFrame:
    """Make a table of where drafted tokens came from, and how many of them were accepted."""
    rows = []
    for name in ordered(methods):
        steps = number(methods[name].get("target_forwards"))
        for source, counts in (methods[name].get("acceptance_by_source") or {}).items():
            drafted, accepted = (number(counts.get(key)) or 0.0 for key in ("drafted", "accepted"))
            share, per_step = accepted / drafted if drafted else None, accepted / steps if steps else None
            row = {"method": name, "source": source, "drafted": fixed(drafted, 0), "accepted": percent(share)}
            rows.append(row | {"accepted tokens per step": fixed(per_step, 2)})
    return table_of(rows)


def positions_table(methods: Mapping[str, Mapping]) -> DataFrame:
    """Make a table of the acceptance rate at the first positions of the draft."""
    rates = {name: (methods[name].get("acceptance_by_position") or [])[:MAX_POSITIONS] for name in ordered(methods)}
    rows = (
        {"method": name} | {str(i): fixed(one, 2) for i, one in enumerate(of, 1)} for name, of in rates.items() if of
    )
    return table_of(rows)


def time_table(methods: Mapping[str, Mapping]) -> DataFrame:
    """Make a table of the share of each stage in the decoding time."""
    timed = [(name, one) for name in ordered(methods) if (one := methods[name].get("time_share"))]
    return table_of({"method": name} | {stage: percent(one.get(stage)) for stage in STAGES} for name, one in timed)


def categories_table(methods: Mapping[str, Mapping]) -> DataFrame:
    """Make a table of speedup and tau in each category of the questions; empty where there is only one."""
    categories = list(dict.fromkeys(c for one in methods.values() for c in one.get("by_category") or {}))
    rows = []
    for name in ordered(methods) if len(categories) > 1 else ():
        found = {c: (methods[name].get("by_category") or {}).get(c) or {} for c in categories}
        cells = {
            c: f"{x.get('no_speedup') or fixed(x.get('speedup'), 2)} ({fixed(x.get('mean_accepted'), 2)})"
            for c, x in found.items()
        }
        rows.append({"method": name} | cells)
    return table_of(rows)


# Trainings and their plans.


def tau_table(content: Mapping) -> tuple[str, DataFrame]:
    """Make a table of tau, one row per setting, as `measure_tau` gives it. Returns title and table."""
    tau, settings = content["tau"], content["settings"]
    first = next(iter(tau))
    rows = [{"context, sampling": s} | {name: plus_minus(row[s], 2) for name, row in tau.items()} for s in tau[first]]
    measured = f"{settings['contexts']} held-out contexts each, {settings['new_tokens']} new tokens"
    return f"tau: tokens produced per target forward pass ({measured}, 95 % intervals)", table_of(rows)


def speed_table(content: Mapping) -> tuple[str, DataFrame]:
    """Make a table of speed by method and draft length, as `measure_speed` gives it. Returns title and table."""
    own = set(content["settings"]["gamma"]) - {"speculative"} or {"speculative"}
    rows = []
    for sampling, by_method in content["speeds"].items():
        named = {name: row for name, row in by_method.items() if name not in own}
        named |= {f"gamma {gamma}": row for gamma, row in content["gammas"][sampling].items()}
        rows += [
            {"sampling": sampling, "drafts": name, "tau": plus_minus(one["tau"], 2)}
            | {"accepted": percent(one["acceptance"]["value"], 0), "tokens/s": fixed(one["tokens_per_s"]["value"], 0)}
            | {"times plain": plus_minus(one["speedup"], 2)}
            for name, one in named.items()
        ]
    title = f"speed, interleaved on {content['timed_contexts']} contexts one at a time, 95 % intervals"
    if (fastest := content["fastest_gamma"]) is None:
        return f"{title}; no gamma is significantly faster than the trained one", table_of(rows)
    return f"{title}; the fastest gamma, exported as the default: {fastest}", table_of(rows)


def head_table(metrics: Mapping[str, float]) -> DataFrame:
    """Make a table of what the validation of an acceptance head measured."""
    known = {
        "eval/kl_binary": "KL of labels and predictions, nats",
        "eval/label": "mean label",
        "eval/predicted": "mean prediction",
        "eval/calibration_error": "expected calibration error",
        "eval/loss": "weighted loss, held out",
    }
    return table_of({"measure": known[key], "value": fixed(metrics[key], 4)} for key in known if key in metrics)


def memory_table(plan: Plan, machine: Machine) -> DataFrame:
    """Make a table of what fills the memory of a rank."""
    rows = [{"memory": name, "size": size(n_bytes)} for name, n_bytes in plan.memory.items()]
    rows.append({"memory": "together", "size": size(plan.bytes)})
    if machine.memory_bytes is not None:
        fits = "" if plan.bytes <= machine.memory_bytes else ": it does not fit"
        rows.append({"memory": "there is", "size": f"{size(machine.memory_bytes)}{fits}"})
    return table_of(rows)
