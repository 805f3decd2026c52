"""What `spectrain.tune` found, as tables for the terminal and the page: the options of SSSD and of stop rules.

Each part is a title and its table, or a text and None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pandas import DataFrame

from spectrain.measure.results import BASELINE
from spectrain.reporting.formats import MISSING, count, fixed, interval, measured, number, percent
from spectrain.reporting.tables import table_of

HEADS_SHOWN = 10  # of acceptance heads
# Columns of tables: head -> key of the results, digits, and the factor of another unit.
RATES = {"discard rate": ("discard_rate", 3), "verification rate": ("verification_rate", 3)}
SPEED = {"predicted tokens/s": ("predicted_tokens_per_s", 0)}
MEASURED = {"measured": ("measured_tokens_per_s", 0), "speedup": ("speedup", 2)}
BEST = RATES | {"tau": ("tau", 2)} | SPEED | MEASURED | {"/ fixed gamma": ("over_best_fixed_gamma", 2)}
AREAS = {"area": ("area", 4), "in sample": ("mean_discard_rate", 3), "held out": ("held_out_mean_discard_rate", 3)}
DIFFERENCES = {"in sample": ("mean_discard_rate_difference", 3), "held out": ("held_out", 3)}
TOGETHER = {"t_draft": ("draft_s", 2, 1e3), "t_target": ("target_s", 2, 1e3)}
ALONE = {f"alone: {head}": column for head, column in TOGETHER.items()}
ALONE |= {"R2": ("r2", 4), "uncentred": ("r2_uncentred", 4)}

Part = tuple[str, DataFrame | None]


def tuned_at(results: Mapping) -> str:
    """What SSSD's options were chosen for: sampling, nodes of a tree, rows."""
    nodes = count(results["candidates"][results["winner"]]["nodes"], "node")
    nodes += " of max_nodes=auto" if results["max_nodes"] == "auto" else ""
    return f"sampling {results['sampling']}; {nodes}; {count(results['batch_size'], 'row')}"


def discount_parts(results: Mapping) -> list[Part]:
    """Modelled tokens per second and acceptance length of SSSD's options, beside plain decoding."""
    plain = results["plain_tokens_per_s"]
    rows = [
        {
            "options": name + (" (chosen)" if name == results["winner"] else ""),
            "nodes": str(one["nodes"]),
            "tau": interval(one["tau"], 3),
            "tokens/s": interval(one["tokens_per_s"], 0),
            "/ plain": fixed(one["tokens_per_s"]["value"] / plain, 2),
        }
        for name, one in results["candidates"].items()
    ]
    rows.append({"options": "plain decoding", "nodes": "1", "tau": fixed(1, 3), "tokens/s": fixed(plain, 0)})
    where = f"simulated on {count(results['responses'][1], 'response')} that nothing was chosen on"
    about = f"SSSD, chosen for tokens/s: {tuned_at(results)}\n{where}; tokens/s are over the seconds of forwards alone"
    return [(about, table_of(rows))]


def stopping_parts(results: Mapping) -> list[Part]:
    """Stop rules, as in SpecDec++: its Tables 3 and 2, areas under the fronts, each head, the oracle of Theorem 4.1."""
    best = [
        {"family": family, "setting": one["name"] if "tau" in one else MISSING} | cells(one, BEST)
        for family, one in results["best"].items()
    ]
    texts = f"{results['texts']} texts simulated, {results['timed']} timed after prefill"
    parts = [(f"Fastest setting of each family ({texts})", table_of(best))]

    low, high = results["areas"]["verification_rates"]
    areas = [{"family": family} | cells(one, AREAS) for family, one in results["areas"]["families"].items()]
    title = "Discard rate along the front, mean over the verification rates that all families reach"
    parts.append((f"{title}: {reach(low, high)}", table_of(areas) if low < high else None))

    fronts = [
        {"fronts": f"{one['family']} - {one['minus']}", "verification rates": reach(*one["verification_rates"])}
        | cells(one, DIFFERENCES)
        | {"on or below": percent(one["share_on_or_below"], 0)}
        for one in results["differences"]
    ]
    title = "Discard rate along one front minus that along another; below 0 the first is better"
    parts.append((title, table_of(fronts)))

    heads = [
        {"head": one["head"], "w_rej": f"{facts['w_rej']:g}", "blocks": str(facts["n_blocks"]), "judge": one["judge"]}
        | {"h": f"{one['best']['value']:g}"}
        | cells(one["best"], RATES | SPEED)
        | cells(one["difference"], {"front, held out": ("held_out", 3)})
        for one in sorted(results["single_heads"], key=_held_out)
        if (facts := results["heads"][one["head"]])
    ]
    more = f" ({len(heads) - HEADS_SHOWN} more in results.json)" if len(heads) > HEADS_SHOWN else ""
    title = f"Each head at its fastest threshold, and its front minus that of fixed gamma{more}"
    parts.append((title, table_of(heads[:HEADS_SHOWN])))

    fit = results["times"]
    times = [
        {"family": family} | cells(fit | one, TOGETHER) | cells(one["by_itself"], ALONE)
        for family, one in fit["families"].items()
    ]
    times.append({"family": BASELINE} | cells(fit["stand_alone"], ALONE))
    title = "T = t_draft N_draft + t_target N_target in ms, fitted with one t_target for all families"
    r2 = f"R2 {fixed(fit['r2'], 4)}, uncentred {fixed(fit['r2_uncentred'], 4)}"
    parts.append((f"{title} ({r2}), and to each family alone", table_of(times)))
    return parts if results["oracle"] is None else [*parts, (oracle_text(results["oracle"]), None)]


def cells(one: Mapping, columns: Mapping[str, tuple]) -> dict[str, str]:
    """Numbers of a result with their intervals; `columns`: head -> key, digits, and the unit's factor."""
    found = {}
    for head, (key, digits, *factor) in columns.items():
        values = {name: number(value) for name, value in measured(one, key).items()}
        scale = factor[0] if factor else 1.0
        found[head] = interval({name: v if v is None else scale * v for name, v in values.items()}, digits)
    return found


def reach(low: float, high: float) -> str:
    return f"{low:.3f} to {high:.3f}" if low < high else "none in common"


def _held_out(one: Mapping) -> float:
    value = number(one["difference"]["held_out"]["value"])
    return math.inf if value is None else value


def oracle_text(oracle: Mapping) -> str:
    """SpecDec++, Theorem 4.1, in words."""
    calls, tokens = (sum(text[name] for text in oracle["texts"]) for name in ("target_calls", "tokens"))
    known = oracle["longest_draft"] is None
    disagreements = f", |S| = {sum(text['disagreements'] for text in oracle['texts'])}" if known else ""
    rates = [oracle[key] for key in ("theorem_tokens_per_s", "predicted_tokens_per_s", "measured_tokens_per_s")]
    theorem, looking, timed = (interval(rate, 0) for rate in rates)
    equal = "as predicted, text by text" if oracle["equal"] else "NOT the calls that were predicted"
    return (
        f"oracle (Theorem 4.1): {calls} target calls for {tokens} tokens (verification rate "
        f"{oracle['verification_rate']:.3f}){disagreements}\n  predicted {theorem} tokens/s, with a look at each "
        f"next token {looking}; measured on {oracle['timed']} texts: {timed} tokens/s, "
        f"{interval(oracle['speedup'], 2)} times autoregressive\n"
        f"  measured: {oracle['measured_discarded']} tokens discarded; {equal}"
    )
