"""A benchmark's results for its readers: `report.html`, one file that needs nothing else.

Takes the content of `results.json`. Whatever is missing there, null or not finite is shown as a dash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from spectrain.measure.results import BASELINE
from spectrain.reporting.bench_table import acceptance, answers, is_peer, lossless_text, outside, shown_name
from spectrain.reporting.formats import count, fixed, number, percent, size, whole, with_half_width
from spectrain.reporting.page import definitions, drawing, heading, note, page, table
from spectrain.reporting.plots import categories_of, draw_plots, ordered

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
        heading(title, 1),
        opening(results),
        facts_of(results),
        heading("Results"),
        main_table(results["methods"]),
        *more_parts(results, rows),
        heading("What the measures mean"),
        definitions(GLOSSARY.items()),
    ]
    return page(title, parts)


def more_parts(results: Mapping, rows: Sequence[Mapping], level: int = 2, prefix: str = "") -> list[str]:
    """What follows the table of methods: categories, plots, failures, methods left out.

    Args:
        results: the content of `results.json`.
        rows: the lines of `questions.jsonl`.
        level: of the headings.
        prefix: of the ids within its plots, where a page shows several benchmarks.
    """
    return [
        _category_table(results["methods"], level),
        *(drawing(plot, level) for plot in draw_plots(results, rows, prefix)),
        _failures(rows, level),
        _skipped(results, level),
    ]


def opening(results: Mapping) -> str:
    """What was done and what came out, in sentences."""
    methods = results["methods"]
    own = [name for name in ordered(methods) if name != BASELINE and not is_peer(methods[name])]
    n_peers = sum(map(is_peer, methods.values()))
    contenders = [BASELINE + " decoding"] * (BASELINE in methods) + [count(len(own), "drafting method")] * bool(own)
    contenders += [f"{count(n_peers, 'peer')} (Hugging Face's own generation)"] * bool(n_peers)
    sentences = [
        "A drafter guesses the next tokens, and the target model checks them all in one forward, keeping those that it "
        f"would have written itself. Measured here on the same questions, taking turns: {', '.join(contenders)}."
    ]
    timed = [name for name in own if number(methods[name].get("speedup")) is not None]
    if timed:
        best = methods[timed[0]]
        times = fixed(best.get("speedup"), 2)
        faster = sum(methods[name]["speedup"] > 1 for name in timed)
        sentences.append(
            f"Fastest was <b>{escape(timed[0])}</b> with {times} times the speed of autoregressive decoding and "
            f"{fixed(best.get('mean_accepted'), 2)} tokens a target forward; {faster} of "
            f"{count(len(timed), 'drafting method')} beat autoregressive decoding."
        )
    judged = [name for name in own if isinstance(methods[name].get("lossless"), bool)]
    differ = [name for name in judged if not methods[name]["lossless"]]
    if differ:
        names = ", ".join(f"{escape(name)} ({whole(methods[name], 'greedy_mismatches')})" for name in differ)
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


def facts_of(results: Mapping) -> str:
    """What a reader needs to judge the numbers, or to repeat them."""
    methods = results["methods"].values()
    asked = results.get("questions") or max((whole(m, "questions") + whole(m, "errors") for m in methods), default=0)
    parameters = number(results.get("target_parameters"))
    facts = {
        "target": f"{results.get('target')}{f' ({parameters / 1e6:,.1f} M parameters)' if parameters else ''}",
        "prompts": f"{results.get('prompts')} ({count(asked, 'question')})",
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
    return definitions((name, str(value)) for name, value in facts.items() if value not in (None, ""))


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


def main_table(methods: Mapping[str, Mapping]) -> str:
    """A line a method, fastest first."""
    heads = ["method", "answers", "mean accepted", "tokens/s", "speedup", "lossless", "outside forward"]
    heads += ["accepted / drafted", "retrieval hits", "discarded a token", "forwards a token"]
    heads += ["tokens/s by question", "peak memory"]
    lines = []
    for name in ordered(methods):
        one = methods[name]
        lossless = "reference" if name == BASELINE else lossless_text(one)
        texts = [
            with_half_width(one, "mean_accepted", 2),
            with_half_width(one, "tokens_per_s_micro", 1),
            with_half_width(one, "speedup", 2),
            lossless,
            percent(outside(one)),
            percent(acceptance(one)),
            percent(one.get("retrieval_hit_rate")),
            fixed(one.get("discard_rate"), 2),
            fixed(one.get("verification_rate"), 2),
            fixed(one.get("tokens_per_s_macro"), 1),
            size(one.get("peak_memory_bytes")),
        ]
        cells = [(shown_name(name, one), ""), (answers(one), "bad" if whole(one, "errors") else "")]
        cells += [(text, "bad" if text.startswith("no (") else "") for text in texts]
        lines.append((_row_class(name), cells))
    return f"{table(heads, lines)}{_differences(methods)}"


def _differences(methods: Mapping[str, Mapping]) -> str:
    """What a dash under `lossless` hides: texts that differ where that proves nothing."""
    unjudged = [name for name, one in methods.items() if not isinstance(one.get("lossless"), bool)]
    counts = {name: whole(methods[name], "greedy_mismatches") for name in unjudged}
    told = ", ".join(f"{name} {n}" for name, n in counts.items() if n)
    if not told:
        return ""
    return note(
        "Greedy texts that differ from autoregressive decoding, which in this dtype rounding alone can explain: "
        f"{told}."
    )


def _category_table(methods: Mapping[str, Mapping], level: int) -> str:
    categories = categories_of(methods)
    if len(categories) < 2:
        return ""
    asked = {
        c: max(whole((m.get("by_category") or {}).get(c) or {}, "questions") for m in methods.values())
        for c in categories
    }
    lines = []
    for name in ordered(methods):
        cells = [(shown_name(name, methods[name]), "")]
        for category in categories:
            one = (methods[name].get("by_category") or {}).get(category) or {}
            cells.append((f"{fixed(one.get('speedup'), 2)}\n{fixed(one.get('mean_accepted'), 2)}", ""))
        lines.append((_row_class(name), cells))
    explained = note(
        "In each cell the speedup over autoregressive decoding, and below it the mean accepted tokens; n questions."
    )
    heads = ["method"] + [f"{c}\nn = {asked[c]}" for c in categories]
    return f"{heading('By category', level)}{explained}{table(heads, lines)}"


def _row_class(method: str) -> str:
    return "baseline" if method == BASELINE else ""


def _failures(rows: Sequence[Mapping], level: int) -> str:
    """What went wrong, equal messages of a method counted together."""
    counts = Counter((row["method"], row["error"]) for row in rows if row.get("error"))
    if not counts:
        return ""
    lines = [
        (_row_class(method), [(method, ""), (str(n), ""), (error, "text")])
        for (method, error), n in counts.most_common(MAX_FAILURES)
    ]
    more = note(f"and {len(counts) - MAX_FAILURES} more") if len(counts) > MAX_FAILURES else ""
    return f"{heading('Questions that failed', level)}{table(['method', 'questions', 'error'], lines)}{more}"


def _skipped(results: Mapping, level: int) -> str:
    skipped = results.get("skipped") or {}
    return f"{heading('Methods left out', level)}{definitions(skipped.items())}" if skipped else ""
