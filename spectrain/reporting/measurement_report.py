"""What a page says of JSON files of measurements: the throughput model, drafters compared, parity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from matplotlib.figure import Figure

from spectrain.reporting.formats import MISSING, bounds_of, count, estimate, fixed, number, whole
from spectrain.reporting.found_runs import Measurement
from spectrain.reporting.page import Markup, definitions, drawing, heading, note, picture, table
from spectrain.reporting.svg import COLOURS, WIDTH_IN, drawn, name_rows, plot_text

DRAFTERS = {"spire": "SPIRe drafter", "vanilla": "vanilla drafter"}
STRONGEST = 0.75  # opacity of a heat map's cell
TWICE = 2.0  # a multiplier at which the colour is that strong


def measurement_parts(run: Measurement, prefix: str) -> list[str]:
    """Title and content of one file, as HTML; the prefix is of the ids within its plots."""
    title = heading(str(run.content.get("title") or run.name), 3, run.anchor)
    return [title, *RENDERERS[run.kind](run, prefix), *_pictures(run)]


def outcome(run: Measurement) -> str:
    """In a few words, for a table of all runs; empty where they would say nothing."""
    if run.kind == "cost":
        return ", ".join(str(one.get("method")) for one in run.content.get("tables") or ())
    if run.kind != "drafters":
        return str(run.content.get("run") or "")
    drafters = run.content.get("drafters") or {}
    setting = next((name for one in drafters.values() for name in one.get("tau") or {}), None)
    taus = {name: number(((one.get("tau") or {}).get(setting) or {}).get("value")) for name, one in drafters.items()}
    known = {name: tau for name, tau in taus.items() if tau is not None}
    best = max(known, key=known.__getitem__, default=None)
    return f"highest tau ({setting}): {best} {estimate(drafters[best]['tau'][setting], 2)}" if best else ""


def _pictures(run: Measurement) -> list[str]:
    """The figures that the file names, with their captions."""
    found = []
    for figure in run.content.get("figures") or ():
        name = str(figure.get("file")).rsplit("/", 1)[-1]
        if name in run.pictures:
            found.append(picture(run.pictures[name], str(figure.get("caption") or name)))
    return found


def _cost(run: Measurement, _: str) -> list[str]:
    """A heat map a method: batch down, context across."""
    hardware = run.content.get("hardware") or {}
    words = {"name": "hardware"}
    given = [(words.get(k, k.replace("_", " ")), _value(v)) for k, v in hardware.items() if v is not None]
    told = note(
        "A throughput model, no measurement: each cell is the throughput with that drafter divided by that of "
        "autoregressive decoding, at a batch size (down) and tokens of context (across). Above 1 (blue) drafting pays, "
        "below 1 (orange) it costs."
    )
    return [definitions(given), told, *(_heat_map(one) for one in run.content.get("tables") or ())]


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _heat_map(one: Mapping) -> str:
    contexts, batches = one["context_tokens"], one["batch"]
    tau, source = number(one.get("tau")), (one.get("tau_is") or {}).get("source")
    facts = [f"tau {tau:.2f}{f', {source}' if source else ''}"] if tau is not None else []
    facts += [f"k = {one['k']} drafted tokens"] if one.get("k") else []
    caption = "; ".join([str(one["method"]), *facts])
    head = "".join(f"<th>{_tokens(context)}</th>" for context in contexts)
    rows = []
    for batch, cells in zip(batches, one["multiplier"], strict=True):
        shaded = "".join(f'<td style="{_shade(cell)}">{fixed(cell, 2)}</td>' for cell in cells)
        rows.append(f"<tr><td>{escape(str(batch))}</td>{shaded}</tr>")
    body = f'<table class="heat"><thead><tr><th>batch</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'{note(caption)}<div class="wide">{body}</div>'


def _shade(cell: object) -> str:
    """Blue above 1, orange below, the further the stronger."""
    value = number(cell)
    if value is None or value <= 0:
        return ""
    share = min(1.0, (value - 1) / (TWICE - 1)) if value > 1 else min(1.0, (1 / value - 1) / (TWICE - 1))
    colour = "0,114,178" if value > 1 else "213,94,0"
    return f"background:rgba({colour},{STRONGEST * share:.2f})" + (";color:#fff" if share > 0.85 else "")


def _tokens(n: object) -> str:
    value = number(n)
    if value is None or value < 1024 or value % 1024:
        return escape(str(n))
    return f"{value / 1024:.0f}K"


def _drafters(run: Measurement, prefix: str) -> list[str]:
    """tau of drafters on the same contexts, and by how much each differs from the first."""
    content = run.content
    drafters, first = content["drafters"], str(content.get("first") or "")
    settings = list(dict.fromkeys(name for one in drafters.values() for name in one.get("tau") or {}))
    counts = ", ".join(f"{n} of {length} tokens" for length, n in (content.get("contexts") or {}).items())
    facts = {
        "target": content.get("target"),
        "contexts": counts,
        "new tokens": content.get("new_tokens"),
        "drafted tokens": content.get("gamma"),
        "device": f"{content.get('device')}, {content.get('dtype')}, {count(whole(content, 'threads'), 'CPU thread')}",
    }
    told = note(
        "tau: tokens that one forward of the target yields, its own included, with 95 % intervals; higher is better. "
        f"Below it the difference from {first or 'the first'}, on the same contexts in pairs: where its interval holds "
        "0 the two are not told apart (unresolved). All: pooled over context lengths."
    )
    lines = []
    for name, one in drafters.items():
        kind = one.get("kind")
        cells = [(f"{name}\n{kind}" if kind else name, "left")]
        cells += [(_compared(one, setting, name == first), "") for setting in settings]
        lines.append(("baseline" if name == first else "", cells))
    parts = [definitions((k, str(v)) for k, v in facts.items() if v not in (None, "")), told]
    parts.append(table(["drafter", *(_of_setting(drafters, setting) for setting in settings)], lines))
    if not run.pictures:
        plot = drawn("tau of each drafter", "Further right is better.", lambda: _bars(drafters, settings), prefix)
        parts += [drawing(plot, 4)] if plot else []
    return parts


def _of_setting(drafters: Mapping[str, Mapping], setting: str) -> str:
    counts = {number((one.get("tau") or {}).get(setting, {}).get("n")) for one in drafters.values()} - {None}
    return f"{setting}\nn = {max(counts):,.0f}" if counts else setting


def _compared(one: Mapping, setting: str, is_first: bool) -> Markup:
    """tau, below it its interval, and below this the difference: narrow, as there are many columns."""
    tau = (one.get("tau") or {}).get(setting) or {}
    value, _, interval = estimate(tau, 2).partition(" ")
    lines = [interval] * bool(interval)
    difference = (one.get("difference") or {}).get(setting)
    if difference and not is_first:
        bounds = bounds_of((difference.get("low"), difference.get("high")))
        unresolved = bounds is not None and bounds[0] <= 0 <= bounds[1]
        more = estimate(difference, 2)
        lines.append(f"{more if more.startswith('-') else '+' + more}{' unresolved' if unresolved else ''}")
    return Markup(escape(value) + "".join(f"<small>{escape(line)}</small>" for line in lines))


def _bars(drafters: Mapping[str, Mapping], settings: Sequence[str]) -> Figure | None:
    """A panel a setting, a bar a drafter, with whiskers."""
    if not settings:
        return None
    n_columns = min(2, len(settings))
    n_rows = -(-len(settings) // n_columns)
    figure = Figure((WIDTH_IN, n_rows * (0.22 * len(drafters) + 0.75)), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
    for ax, setting in zip(grid.flat, settings, strict=False):
        for y, (i, one) in enumerate(enumerate(drafters.values())):
            found = (one.get("tau") or {}).get(setting) or {}
            value, bounds = number(found.get("value")), bounds_of((found.get("low"), found.get("high")))
            if value is not None:
                ax.barh(y, value, 0.7, color=COLOURS[i % len(COLOURS)])
                ax.annotate(f"{value:.2f}", (max(value, *(bounds or (0.0,))), y), (4, 0), va="center", **POINTS)
            if bounds:
                ax.plot(bounds, (y, y), color="#222222", linewidth=1.0)
        ax.axvline(1.0, color="#333333", linewidth=0.8, linestyle=(0, (4, 3)))
        ax.set_title(plot_text(setting), fontsize=9, loc="left")
        ax.tick_params(labelbottom=True)
    name_rows(grid[0, 0], [plot_text(name) for name in drafters])
    for ax in list(grid.flat)[len(settings) :]:
        ax.set_visible(False)
    figure.supxlabel("tau, tokens a target forward", fontsize=8.5)
    return figure


POINTS = {"textcoords": "offset points", "fontsize": 7.5}


def _parity(run: Measurement, prefix: str) -> list[str]:
    """Acceptance by draft position, measured in several ways."""
    positions, kind = run.content["positions"], run.content.get("drafter_kind")
    told = note(
        f"The {DRAFTERS.get(kind, 'drafter')} of {run.content.get('run')}, measured in several ways "
        "under one definition: of the steps whose earlier drafted tokens were all accepted, the share in which the "
        "token at this position is accepted too; 95 % intervals in brackets. The loop: what decoding accepted. "
        "Computed, steps: what training's arithmetic expects of the same steps; assisted: Hugging Face's generation. "
        "These three should be equal but for chance. Validation reads other text, and computed, all text begins "
        "drafts everywhere: these may differ."
    )
    rows = run.content["rows"]
    heads = [*(f"position {p}" for p in positions), "tau", "steps"]
    parts = [told, table(["measured by", *heads], [_parity_line(name, one, positions) for name, one in rows.items()])]
    apart = run.content.get("differences") or {}
    if apart:
        lines = [_parity_line(name, one, positions) for name, one in apart.items()]
        parts += [
            note("Differences, on the same texts; 0 within the interval: none was found. Of many a few miss it."),
            table(["of", *heads], lines),
        ]
    if not run.pictures:
        plot = drawn("Acceptance by position", "Higher is better.", lambda: _lines(positions, rows), prefix)
        parts += [drawing(plot, 4)] if plot else []
    return parts


def _parity_line(name: str, one: Mapping, positions: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
    found = [(estimate(each, 3), "") for each in one.get("acceptance") or ()]
    found += [(MISSING, "")] * (len(positions) - len(found))
    tau, steps = one.get("tau"), number(one.get("steps"))
    ends = [estimate(tau, 3) if isinstance(tau, Mapping) else fixed(tau, 3), fixed(steps, 0)]
    return "", [(name, "left"), *found, *((text, "") for text in ends)]


def _lines(positions: Sequence[int], rows: Mapping[str, Mapping]) -> Figure | None:
    figure = Figure((WIDTH_IN * 0.62, 3.4), layout="constrained")
    ax = figure.subplots()
    drawn_any = False
    for i, (name, one) in enumerate(rows.items()):
        for place, found in zip(positions, one.get("acceptance") or (), strict=False):
            bounds = bounds_of((found.get("low"), found.get("high")))
            x = place + 0.06 * (i - len(rows) / 2)  # side by side, so that whiskers can be told apart
            if bounds:
                ax.plot((x, x), bounds, color=COLOURS[i], linewidth=1.2)
            if number(found.get("value")) is not None:
                drawn_any = True
                label = name if place == positions[0] else None
                ax.plot(x, found["value"], "o", color=COLOURS[i], markersize=4.5, label=label)
    ax.set(xlabel="position in the draft", ylabel="acceptance probability", ylim=(0, 1))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(frameon=False)
    ax.grid(color="#e5e5e5", linewidth=0.6)
    return figure if drawn_any else None


RENDERERS = {"cost": _cost, "drafters": _drafters, "parity": _parity}
TITLES = {"cost": "Throughput model", "drafters": "Drafters compared", "parity": "Parity"}
