"""Measure methods with the options of their papers, and write papers_<paper>.json of this folder.

    python docs/results/papers.py logitspec prompts=<folder> limit=24 target=smollm2 max_new_tokens=128

The paper is logitspec, sssd, spectra or specdecpp. `limit` questions of each file in the folder are asked, four of each
in a run, and the table is written after each run. The same command resumes after an interruption. Further arguments are
options of the runs. Baselines of two papers, such as `rest`, are measured in the runs of one of them. Without `limit`
the table is written from the runs that are there; that of `spire` from the run folder runs/papers/spire of a training.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from spectrain.data.prompts import read_prompts
from spectrain.measure.statistics import Estimate, of_sums
from spectrain.stores.files import read_json, write_json

PART = 4  # questions of each file in a run
FOLDER, RUNS = Path(__file__).parent, Path("runs/papers")
FIXED, HEADS = [f"spire_{g}" for g in (2, 4, 6, 8, 10, 12, 14)], ["specdecpp", "h_01", "h_03", "h_05", "h_09"]
OPTIONS = {  # of bench
    "logitspec": ["variants=ablations", "methods=[pld,lookahead,logitspec,no_last_logits,no_retrieval]"],
    "sssd": ["methods=[rest,sssd_input,sssd_datastore,sssd]"],
    "spectra": [
        "variants=ablations",
        "methods=[anpd,spectra_core,spectra_retrieval,spectra,no_forward,no_backward,no_sub_ngrams,"
        "core_replace,core_threshold,core_both]",  # what our own options change
        "+variants.core_replace={method: spectra_core, replace_prefixes: true}",
        "+variants.core_threshold={method: spectra_core, threshold: 0.1}",
        "+variants.core_both={method: spectra_core, replace_prefixes: true, threshold: 0.1}",
    ],
    "specdecpp": [  # the drafter of the shipped head is a SPIRe drafter, which therefore drafts the fixed lengths, too
        f"methods=[{','.join(HEADS + FIXED)}]",
        *(f"+variants.{name}={{method: spire, gamma: {name[6:]}}}" for name in FIXED),
        *(f"+variants.{name}={{method: specdecpp, threshold: 0.{name[3:]}}}" for name in HEADS[1:]),
    ],
}
PAIRS = {  # whose difference is estimated
    "logitspec": "logitspec-pld logitspec-lookahead logitspec-rest no_last_logits-logitspec no_retrieval-logitspec",
    "sssd": "sssd-sssd_input sssd-sssd_datastore sssd-rest",
    "spectra": "spectra-lookahead spectra-rest spectra-anpd spectra-spectra_core spectra-spectra_retrieval "
    "spectra_core-lookahead no_forward-spectra_core no_backward-spectra_core no_sub_ngrams-spectra_core "
    "core_replace-spectra_core core_threshold-spectra_core core_both-spectra_core core_both-lookahead",
    "specdecpp": "",
}
Counts = Mapping[tuple[str, str], Sequence[int]]  # (category, question) -> tokens, forwards, discarded tokens


def measure(paper: str, prompts: Path, limit: int, options: Sequence[str]) -> None:
    asked = [read_prompts(file, limit) for file in sorted(prompts.iterdir())]
    for start in range(0, limit, PART):
        questions = RUNS / f"questions-{start}.jsonl"
        rows = [one for some in zip(*asked, strict=True) for one in some][start * len(asked) :][: PART * len(asked)]
        lines = ({"question_id": one.id, "category": one.category, "turns": one.turns} for one in rows)
        questions.parent.mkdir(parents=True, exist_ok=True)
        questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if not (RUNS / f"{paper}-{start}" / "results.json").is_file():
            given = (f"paper={paper}", *OPTIONS[paper], f"prompts={questions}", f"out={RUNS}/{paper}-{start}")
            subprocess.run([sys.executable, "-m", "spectrain.bench", *given, *options], check=True)
        write(paper)


def read_counts() -> dict[str, Counts]:
    """Return what each method of all runs did, by its name."""
    counts: dict[str, dict] = {}
    for file in RUNS.glob("*/questions.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            if row["error"] is None:
                discarded = sum(row["drafted"]) - sum(row["accepted"])
                numbers = sum(map(len, row["replies"])) - row["turns"], row["target_forwards"], discarded
                counts.setdefault(row["method"], {})[row["category"], row["question_id"]] = numbers
    return counts


def estimate(function: Callable[..., np.ndarray], methods: Sequence[Counts], category: str | None = None) -> Estimate:
    """Estimate function(tokens, forwards, discarded, and those of the next method, ..) over the questions of all."""
    asked = sorted(set.intersection(*(set(one) for one in methods)))
    asked = [one for one in asked if category in (None, one[0])]
    return of_sums(function, *(column for one in methods for column in np.array([one[q] for q in asked]).T))


def tau(tokens: np.ndarray, forwards: np.ndarray, _: np.ndarray, *others: np.ndarray) -> np.ndarray:
    return tokens / forwards - (others[0] / others[1] if others else 0)


def above_fixed(*sums: np.ndarray) -> np.ndarray:
    """Discard rates of the heads less those on the front of fixed lengths with as many target calls, on average."""
    tokens, forwards, discarded = np.moveaxis(np.reshape(sums, (len(HEADS + FIXED), 3, -1)), 1, 0)
    of_drafts = zip((forwards / tokens).T, (discarded / tokens).T, strict=True)
    n = len(HEADS)
    gaps = []
    for calls, discards in of_drafts:
        order = calls[n:].argsort()  # a length with more calls and more discards than another is not on the front
        front = np.interp(calls[:n], calls[n:][order], np.minimum.accumulate(discards[n:][order]))
        inside = (calls[:n] >= calls[n:].min()) & (calls[:n] <= calls[n:].max())
        gaps.append((discards[:n] - front)[inside].mean())
    return np.array(gaps) if np.ndim(sums[0]) else gaps[0]


def write_spire() -> None:
    """Write the table of a training, of the run folder runs/papers/spire."""
    result, begun = (read_json(RUNS / "spire" / name) for name in ("result.json", "run.json"))
    typed = [one for one in begun["command"].split() if not one.startswith(("run_dir=", "out="))]
    rows = [
        [f"`spire` at {setting.replace(', ', ' and ')}", "{value:.3f} [{low:.3f}, {high:.3f}]".format(**one)]
        for setting, one in result["tau"]["spire"].items()
    ]
    note = f"{result['steps']} steps, {result['tokens']:,} tokens; the tau that is expected at T = 1 on held-out rows: "
    note += f"{result['metrics']['eval/tau_expected']:.3f}."
    date = begun["attempts"][-1]["started"].split("T")[0]
    facts = {"title": "tau with paper=spire", "date": date, "machine": "cpu (AMD EPYC), one thread"}
    facts |= {"model": "pystdlib-8l", "dtype": "bfloat16 weights", "batch": "8", "threads": 1}
    facts |= {"command": " ".join([*typed, f"run_dir={RUNS}/spire"]), "note": note}
    write_json(FOLDER / "papers_spire.json", facts | {"columns": ["tau", "all"], "rows": rows})


def write(paper: str) -> None:
    """Write the table from the runs that are there."""
    if paper == "spire":
        return write_spire()
    counts, results = read_counts(), read_json(max(RUNS.glob("*/results.json"), key=lambda file: file.stat().st_mtime))
    pairs = [pair.split("-") for pair in PAIRS[paper].split() if all(one in counts for one in pair.split("-"))]
    shown = dict.fromkeys([name for pair in pairs for name in reversed(pair)] or HEADS + FIXED)
    kinds = sorted({category for category, _ in counts[next(iter(shown))]})
    rows = []
    for names in [*([name] for name in shown), *pairs]:
        methods = [counts[name] for name in names]
        row = [" less ".join(f"`{name}`" for name in names)]
        row += [f"{estimate(tau, methods, kind).value:.2f}" for kind in kinds] + [str(estimate(tau, methods))]
        if paper == "specdecpp":
            row += [f"{estimate(lambda t, f, d, n=n: (f, d)[n] / t, methods).value:.3f}" for n in (0, 1)]
        rows.append([*row, str(len(set.intersection(*(set(one) for one in methods))))])
    if paper == "specdecpp":
        *gaps, gap = (estimate(above_fixed, [counts[name] for name in HEADS + FIXED], kind) for kind in (*kinds, None))
        row = ["discard rate less that of fixed lengths", *(f"{one.value:.2f}" for one in gaps), str(gap)]
        rows.append([*row, "", "", str(len(counts["specdecpp"]))])
    columns = ["tau", *kinds, "all", *(["verification rate", "discard rate"] if paper == "specdecpp" else [])]
    facts = {
        "title": f"tau with paper={paper}",
        "date": results["date"].split()[0],
        "machine": f"{results['device']}, one thread",
        "model": "SmolLM2-135M-Instruct",
        "dtype": results["dtype"],
        "batch": str(results["batch_size"]),
        "threads": results["threads"],
        "command": f"python docs/results/papers.py {paper} prompts=<folder> limit=24 target=smollm2 max_new_tokens=128",
        "columns": [*columns, "questions"],
        "rows": rows,
    }
    write_json(FOLDER / f"papers_{paper}.json", facts)


if __name__ == "__main__":
    paper, *given = sys.argv[1:]
    own = dict(one.split("=", 1) for one in given if one.startswith(("prompts=", "limit=")))
    if "limit" in own:
        options = [one for one in given if one.split("=", 1)[0] not in own]
        measure(paper, Path(own["prompts"]), int(own["limit"]), options)
    write(paper)
