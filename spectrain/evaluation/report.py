"""A benchmark's results for its readers: `report.html`, one file that needs nothing else, and a table for the terminal.

Both take the content of `results.json`. Whatever is missing there, null or not finite is shown as a dash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from spectrain.evaluation.plots import Plot, categories_of, draw_plots, number, ordered
from spectrain.evaluation.results import BASELINE

MISSING = "–"
MAX_FAILURES = 20  # lines of the report
GLOSSARY = {
    "target": "the model that is to be made faster, and whose distribution every method must keep",
    "drafter": "what guesses the next tokens: a small model, a table of n-grams, a datastore, the target itself",
    "step": "one forward of the target, which checks all drafted tokens at once; it yields the accepted ones and one "
    "token of the target's own",
    "autoregressive": "decoding without a drafter, one token a forward, in the same loop: what speedups refer to",
    "peer": "Hugging Face's own generation, on the same model and prompts; its steps cannot be looked into",
    "answers": "questions answered, of how many where some failed",
    "mean accepted": "tokens a step yields on average, the target's own included: (emitted tokens - 1) / target "
    "forwards after the prompt was read; autoregressive decoding has 1. Also called tau or MAT",
    "±": "half the width of the 95 % interval, by a bootstrap over questions; left out where only one was answered",
    "tokens/s": "all tokens / all time, reading the prompts included; another column has the mean of the questions' "
    "own rates",
    "speedup": "tokens/s divided by those of autoregressive decoding, on the same questions and in the same run",
    "outside forward": "share of the time after the prompt was read that was not spent in the target's forward: "
    "drafting, verifying, committing to the cache, and the rest of the loop",
    "accepted / drafted": "share of the drafted tokens that the target accepted; trees draft alternatives of which at "
    "most one can be accepted, so a low share need not be bad",
    "retrieval hits": "share of the steps in which a method that looks continuations up found one",
    "lossless": "whether greedy text equalled that of autoregressive decoding token by token, on every question. "
    "Judged in float32 only: in half precision, rounding alone can turn a near tie",
    "discarded a token": "drafted tokens thrown away, for each token emitted",
    "forwards a token": "target forwards after the prompt, for each token emitted: lower is better",
    "peak memory": "most GPU memory in use while the method ran; on a CPU, the memory that the process held",
    "draft, forward, verify, commit, other": "parts of a step: guessing tokens, the target's forward over them, "
    "deciding which are kept, moving these to their place in the cache, and the remaining bookkeeping",
    "source": "where a drafted token came from: forward and backward (SPECTRA's tables), input (the text so far), "
    "datastore (a corpus), logits (the target's last distribution), draft (a draft model)",
}
STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 1.5rem; max-width: 80rem; background: #fff; color: #222; line-height: 1.45;
  font-family: system-ui, "Segoe UI", "DejaVu Sans", Verdana, sans-serif; font-size: 15px; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 60rem; } .note { color: #555; font-size: .9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .45rem; text-align: right; border-bottom: 1px solid #e3e3e3; }
th { font-weight: 600; border-bottom: 2px solid #999; max-width: 7.5rem; vertical-align: bottom; }
td { white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff; min-width: 10.5rem; max-width: 14rem; }
tr.baseline td { background: #f2f2f2; } small { display: block; white-space: nowrap; color: #555; font-weight: 400; }
.bad { color: #b00020; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: .5rem 0; font-size: .92rem; }
dt { font-weight: 600; max-width: 14rem; } dd { margin: 0; overflow-wrap: anywhere; }
code { background: #f2f2f2; padding: .1rem .3rem; } figure { margin: .6rem 0 0; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
"""


def write_report(path: str | Path, results: Mapping, rows: Sequence[Mapping]) -> None:
    """Writes `report.html`; see `render_html`."""
    Path(path).write_text(render_html(results, rows), encoding="utf-8")


def render_html(results: Mapping, rows: Sequence[Mapping]) -> str:
    """The report as one HTML page without external resources.

    Args:
        results: the content of `results.json`.
        rows: the lines of `questions.jsonl`.
    """
    title = f"Speculative decoding on {results.get('target', 'a target model')}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _opening(results),
        _facts(results),
        "<h2>Results</h2>",
        _main_table(results["methods"]),
        _category_table(results["methods"]),
        *map(_figure, draw_plots(results, rows)),
        _failures(rows),
        _skipped(results),
        "<h2>What the measures mean</h2>",
        _definitions(GLOSSARY.items()),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    body = "\n".join(part for part in parts if part)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}{viewport}</head>\n<body>\n{body}\n</body></html>\n'


def _opening(results: Mapping) -> str:
    """What was done and what came out, in sentences."""
    methods = results["methods"]
    own = [name for name in ordered(methods) if name != BASELINE and not _is_peer(methods[name])]
    n_peers = sum(map(_is_peer, methods.values()))
    contenders = [BASELINE + " decoding"] * (BASELINE in methods) + [_count(len(own), "drafting method")] * bool(own)
    contenders += [f"{_count(n_peers, 'peer')} (Hugging Face's own generation)"] * bool(n_peers)
    sentences = [
        "A drafter guesses the next tokens, and the target model checks them all in one forward, keeping those that it "
        f"would have written itself. Measured here on the same questions, taking turns: {', '.join(contenders)}."
    ]
    timed = [name for name in own if number(methods[name].get("speedup")) is not None]
    if timed:
        best = methods[timed[0]]
        faster = sum(methods[name]["speedup"] > 1 for name in timed)
        sentences.append(
            f"Fastest was <b>{escape(timed[0])}</b> with {_speedup(best)} the speed of autoregressive decoding and "
            f"{_fixed(best.get('mean_accepted'), 2)} tokens a target forward; {faster} of "
            f"{_count(len(timed), 'drafting method')} beat autoregressive decoding."
        )
    judged = [name for name in own if isinstance(methods[name].get("lossless"), bool)]
    differ = [name for name in judged if not methods[name]["lossless"]]
    if differ:
        names = ", ".join(f"{escape(name)} ({_whole(methods[name], 'greedy_mismatches')})" for name in differ)
        sentences.append(
            f'<span class="bad">Questions whose text differed from autoregressive decoding: {names}.</span>'
        )
    elif judged:
        sentences.append("Every one of them wrote the same text as autoregressive decoding, token by token.")
    sentences += [
        f'<span class="bad">{escape(name)}: {escape(one["warning"])}.</span>'
        for name, one in methods.items()
        if one.get("warning")
    ]
    return "".join(f"<p>{sentence}</p>" for sentence in sentences)


def _facts(results: Mapping) -> str:
    methods = results["methods"].values()
    asked = results.get("questions") or max((_whole(m, "questions") + _whole(m, "errors") for m in methods), default=0)
    parameters = number(results.get("target_parameters"))
    facts = {
        "target": f"{results.get('target')}{f' ({parameters / 1e6:,.1f} M parameters)' if parameters else ''}",
        "prompts": f"{results.get('prompts')} ({_count(asked, 'question')})",
        "device": results.get("device"),
        "CPU threads": results.get("threads"),
        "dtype": results.get("dtype"),
        "batch size": results.get("batch_size"),
        "reply length": f"at most {results['max_new_tokens']} tokens" if results.get("max_new_tokens") else None,
        "nodes a step": _nodes(results),
        "datastores": _stores(results.get("datastores") or {}),
        "sampling": describe_sampling(results.get("sampling") or {}),
        "verification": f"{results['verification']} by {results['verification']}"
        if results.get("verification")
        else None,
        "seed": results.get("seed"),
        "versions": ", ".join(f"{name} {version}" for name, version in (results.get("versions") or {}).items()),
        "date": results.get("date"),
        "command": results.get("command"),
    }
    return _definitions((name, str(value)) for name, value in facts.items() if value not in (None, ""))


def _nodes(results: Mapping) -> str | None:
    """The budget of all methods; under `auto`, what each method's measurements chose for full batches."""
    if results.get("max_nodes") != "auto":
        return results.get("max_nodes") or ("each method's own" if "max_nodes" in results else None)
    chosen = {
        name: m["max_nodes"]["auto"] for name, m in results["methods"].items() if isinstance(m.get("max_nodes"), dict)
    }
    parts = (f"{name} {nodes[max(nodes, key=int)]}" for name, nodes in chosen.items())
    return f"auto: {', '.join(parts)}"


def _stores(stores: Mapping[str, str]) -> str:
    """Each folder, and the methods that draft from it."""
    by_folder: dict[str, list[str]] = {}
    for name, folder in stores.items():
        by_folder.setdefault(folder, []).append(name)
    return "; ".join(f"{folder} ({', '.join(names)})" for folder, names in by_folder.items())


def describe_sampling(sampling: Mapping) -> str:
    """The options that are on, in words."""
    if not sampling.get("temperature"):
        return "greedy (temperature 0)"
    on = [f"temperature {sampling['temperature']:g}"]
    for key, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
        if sampling.get(key, off) not in (off, None):
            on.append(f"{key.replace('_', '-')} {sampling[key]:g}")
    return ", ".join(on)


def _main_table(methods: Mapping[str, Mapping]) -> str:
    heads = ["method", "answers", "mean accepted", "tokens/s", "speedup", "lossless", "outside forward"]
    heads += ["accepted / drafted", "retrieval hits", "discarded a token", "forwards a token"]
    heads += ["tokens/s by question", "peak memory"]
    lines = []
    for name in ordered(methods):
        one = methods[name]
        lossless = "reference" if name == BASELINE else _lossless(one)
        texts = [
            _with_half_width(one, "mean_accepted", 2),
            _with_half_width(one, "tokens_per_s_micro", 1),
            _with_half_width(one, "speedup", 2),
            lossless,
            _percent(_outside(one)),
            _percent(_acceptance(one)),
            _percent(one.get("retrieval_hit_rate")),
            _fixed(one.get("discard_rate"), 2),
            _fixed(one.get("verification_rate"), 2),
            _fixed(one.get("tokens_per_s_macro"), 1),
            _bytes(one.get("peak_memory_bytes")),
        ]
        cells = [(_name(name, one), ""), (_answers(one), "bad" if _whole(one, "errors") else "")]
        cells += [(text, "bad" if text.startswith("no (") else "") for text in texts]
        lines.append((name, cells))
    return f"{_table(heads, lines)}{_differences(methods)}"


def _differences(methods: Mapping[str, Mapping]) -> str:
    """What a dash under `lossless` hides: texts that differ where that proves nothing."""
    unjudged = [name for name, one in methods.items() if not isinstance(one.get("lossless"), bool)]
    counts = {name: _whole(methods[name], "greedy_mismatches") for name in unjudged}
    told = ", ".join(f"{escape(name)} {count}" for name, count in counts.items() if count)
    if not told:
        return ""
    return (
        '<p class="note">Greedy texts that differ from autoregressive decoding, which in this dtype rounding alone can '
        f"explain: {told}.</p>"
    )


def _category_table(methods: Mapping[str, Mapping]) -> str:
    categories = categories_of(methods)
    if len(categories) < 2:
        return ""
    asked = {
        c: max(_whole((m.get("by_category") or {}).get(c) or {}, "questions") for m in methods.values())
        for c in categories
    }
    lines = []
    for name in ordered(methods):
        cells = [(_name(name, methods[name]), "")]
        for category in categories:
            one = (methods[name].get("by_category") or {}).get(category) or {}
            cells.append((f"{_fixed(one.get('speedup'), 2)}\n{_fixed(one.get('mean_accepted'), 2)}", ""))
        lines.append((name, cells))
    table = _table(["method"] + [f"{c}\nn = {asked[c]}" for c in categories], lines)
    note = "In each cell the speedup over autoregressive decoding, and below it the mean accepted tokens; n questions."
    return f'<h2>By category</h2><p class="note">{note}</p>{table}'


def _table(heads: Sequence[str], lines: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Lines are (method, cells), a cell (text, class); what follows a line break in a text is set smaller."""
    html = ["<thead><tr>", *(f"<th>{_two_lines(head)}</th>" for head in heads), "</tr></thead><tbody>"]
    for name, cells in lines:
        html.append('<tr class="baseline">' if name == BASELINE else "<tr>")
        html += [
            f'<td class="{css}">{_two_lines(text)}</td>' if css else f"<td>{_two_lines(text)}</td>"
            for text, css in cells
        ]
        html.append("</tr>")
    return f'<div class="wide"><table>{"".join(html)}</tbody></table></div>'


def _two_lines(text: str) -> str:
    first, _, second = text.partition("\n")
    return f"{escape(first)}<small>{escape(second)}</small>" if second else escape(first)


def _figure(plot: Plot) -> str:
    title, explanation = escape(plot.title), escape(plot.explanation)
    return f'<h2>{title}</h2><p class="note">{explanation}</p><figure aria-label="{title}">{plot.svg}</figure>'


def _failures(rows: Sequence[Mapping]) -> str:
    """What went wrong, equal messages of a method counted together."""
    counts = Counter((row["method"], row["error"]) for row in rows if row.get("error"))
    if not counts:
        return ""
    lines = [
        (method, [(method, ""), (str(n), ""), (error, "text")])
        for (method, error), n in counts.most_common(MAX_FAILURES)
    ]
    more = f'<p class="note">and {len(counts) - MAX_FAILURES} more</p>' if len(counts) > MAX_FAILURES else ""
    return f"<h2>Questions that failed</h2>{_table(['method', 'questions', 'error'], lines)}{more}"


def _skipped(results: Mapping) -> str:
    skipped = results.get("skipped") or {}
    return f"<h2>Methods left out</h2>{_definitions(skipped.items())}" if skipped else ""


def _definitions(items) -> str:
    pairs = (f"<dt>{escape(str(term))}</dt><dd>{escape(str(text))}</dd>" for term, text in items)
    return f"<dl>{''.join(pairs)}</dl>"


def render_table(results: Mapping) -> Table:
    """The results as a table for a terminal of 100 columns; what failed or was skipped stands below it."""
    methods = results["methods"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, caption_justify="left")
    table.add_column("method", overflow="fold", min_width=8)
    heads = ["answers", "mean\naccepted", "tokens/s", "speedup", "outside\nforward", "accepted/\ndrafted"]
    for head in [*heads, "lookup\nhits", "lossless"]:
        table.add_column(head, justify="right", no_wrap=True)
    for name in ordered(methods):
        one = methods[name]
        lossless = _lossless(one).replace(" ", "")
        table.add_row(
            Text(f"{name}{'*' if _is_peer(one) else ''}", style="dim" if name == BASELINE else ""),
            Text(_answers(one), style="red" if _whole(one, "errors") else ""),
            _with_half_width(one, "mean_accepted", 2).replace("± ", "±"),
            _fixed(one.get("tokens_per_s_micro"), 1),
            _fixed(one.get("speedup"), 2, "x"),
            _percent(_outside(one)),
            _percent(_acceptance(one)),
            _percent(one.get("retrieval_hit_rate"), 0),
            Text(lossless, style="red" if lossless.startswith("no") else ""),
        )
    notes = ["* peer: Hugging Face's own generation"] if any(map(_is_peer, methods.values())) else []
    failed = {name: _whole(one, "errors") for name, one in methods.items()}
    notes += [f"{name}: {_count(n, 'question')} failed" for name, n in failed.items() if n]
    notes += [f"{name}: {one['warning']}" for name, one in results["methods"].items() if one.get("warning")]
    notes += [f"skipped {name}: {reason}" for name, reason in (results.get("skipped") or {}).items()]
    if notes:
        table.caption = Text("\n".join(notes))  # Text: brackets in a reason are no markup
    return table


def _is_peer(one: Mapping) -> bool:
    return one.get("kind") == "peer"


def _answers(one: Mapping) -> str:
    """How many questions were answered, of how many where some failed."""
    answered, failed = _whole(one, "questions"), _whole(one, "errors")
    return f"{answered}/{answered + failed}" if failed else str(answered)


def _name(name: str, one: Mapping) -> str:
    return f"{name} (peer)" if _is_peer(one) else name


def _whole(one: Mapping, key: str) -> int:
    """A count; 0 where it is missing."""
    return int(number(one.get(key)) or 0)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _fixed(value: object, digits: int, unit: str = "") -> str:
    value = number(value)
    return MISSING if value is None else f"{value:,.{digits}f}{unit}"


def _percent(value: object, digits: int = 1) -> str:
    value = number(value)
    return MISSING if value is None else f"{100 * value:.{digits}f} %"


def _speedup(one: Mapping) -> str:
    return f"{_fixed(one.get('speedup'), 2)} times"


def _with_half_width(one: Mapping, measure: str, digits: int, unit: str = "") -> str:
    bounds = [number(bound) for bound in one.get(f"{measure}_ci95") or ()]
    text = _fixed(one.get(measure), digits, unit)
    if len(bounds) != 2 or None in bounds or text == MISSING:
        return text
    return f"{text} ± {(bounds[1] - bounds[0]) / 2:.{digits}f}"


def _outside(one: Mapping) -> float | None:
    forward = number((one.get("time_share") or {}).get("forward"))
    return None if forward is None else 1.0 - forward


def _acceptance(one: Mapping) -> float | None:
    drafted, accepted = number(one.get("drafted")), number(one.get("accepted"))
    return accepted / drafted if drafted and accepted is not None else None


def _lossless(one: Mapping) -> str:
    if not isinstance(one.get("lossless"), bool):
        return MISSING
    return "yes" if one["lossless"] else f"no ({_whole(one, 'greedy_mismatches')})"


def _bytes(value: object) -> str:
    value = number(value)
    if not value:
        return MISSING
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
