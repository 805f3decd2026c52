"""Run the ablations of the papers as sweeps of `bench` and trainings, and draw SpecDec++'s figures from their results.

    python scripts/ablations.py specdecpp prompts=<file.jsonl> target=<target> limit=40 sampling=t1 target.dtype=float32
    python scripts/ablations.py spectra|logitspec|sssd prompts=<file.jsonl> target=<target> limit=40
    python scripts/ablations.py spire [target=<target> corpus=<file>]
    python scripts/ablations.py engine [target=<target> corpus=<file> init=<drafter>]

    specdecpp   discard and verification rate over the threshold, and speed against the best fixed gamma (its Figure 3
                and Table 2), beside the stop rules by confidence and entropy
    spectra     forward and backward candidates and sub-n-grams
    logitspec   without the last logits, without the lookup (its Table 3)
    sssd        its sources one by one (its Figure 4a)
    spire       each part of the drafter's training (its Table 1 and Figure 5); every variant reads the same tokens
    engine      what +engine=vllm costs: with and without own keys and sinks, three seeds, tau computed on held-out rows

Further arguments are options of each run. The same command resumes after an interruption: finished runs are skipped.
Results lie in runs/ablations/<name>/; `results.json` there has one row per setting, and specdecpp.png the figure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

from spectrain.config import read_yaml
from spectrain.stores.files import write_json

SWEPT = {  # method -> option -> values: those of the paper and what surrounds them
    "specdecpp": {"threshold": (0.1, 0.3, 0.5, 0.7, 0.9)},
    "confidence_stop": {"threshold": (0.1, 0.2, 0.4, 0.6, 0.8)},
    "entropy_stop": {"threshold": (0.25, 0.5, 1.0, 1.5, 3.0)},
    "speculative": {"gamma": (2, 4, 6, 8, 10, 12, 14)},
}
VARIANTS = {  # ablation -> the group of variants in conf/, and the methods that are measured
    "spectra": (
        "ablations",
        ("spectra_core", "no_forward", "no_backward", "no_sub_ngrams", "from_prompt", "lookahead"),
    ),
    "logitspec": ("ablations", ("logitspec", "no_last_logits", "no_retrieval", "pld")),
    "sssd": ("retrieval", ("sssd", "sssd_input", "sssd_datastore")),
}
TRAINED = "none,random_init,distill,hard,no_feedback,no_target_activations,dense_kv"
EQUAL = ("max_steps=380", "select.every=0", "tau.contexts=64", "tau.context_tokens=[256]")
SEEDS = (1, 2, 3)
SHORT = (
    *("max_steps=120", "trainer.val_check_interval=120", "data.row_tokens=512", "data.batch_size=2"),
    *("select.every=0", "tau.contexts=4", "tau.context_tokens=[128]", "tau.new_tokens=32", "tau.timed_contexts=1"),
)
KEPT = ("mean_accepted", "mean_accepted_ci95", "tokens_per_s_micro", "speedup", "speedup_ci95")
KEPT = (*KEPT, "discard_rate", "verification_rate", "lossless")
T_OF_THREE = 4.303  # Student's t of 95 % for three seeds
STYLES = {"specdecpp": "o-", "confidence_stop": "^:", "entropy_stop": "v-.", "speculative": "s--"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ablation", choices=["specdecpp", *VARIANTS, "spire", "engine"])
    parser.add_argument("options", nargs="*", help="of spectrain.bench or spectrain.train, written name=value")
    args = parser.parse_args()
    folder = Path("runs/ablations") / args.ablation
    folder.mkdir(parents=True, exist_ok=True)
    if args.ablation == "specdecpp":
        rows = stop_rules(folder, args.options)
        figure_of(rows).savefig(folder / "specdecpp.png", dpi=130)
    elif args.ablation == "spire":
        rows = trainings(folder, args.options)
    elif args.ablation == "engine":
        rows = engines(folder, args.options)
    else:
        rows = variants(folder, *VARIANTS[args.ablation], args.options)
    write_json(folder / "results.json", {"ablation": args.ablation, "options": args.options, "rows": rows})
    for row in rows:
        print(", ".join(f"{name} {shown(value)}" for name, value in row.items() if value is not None))
    print(f"{folder}/results.json")


def stop_rules(folder: Path, options: Sequence[str]) -> list[dict]:
    """Sweep every stop rule and fixed draft length. The speed of each is compared with that of the best fixed one."""
    rows = []
    for method, swept in SWEPT.items():
        for option, values in swept.items():
            within = f"out={folder}/{method}-${{method.{option}}}"
            listed = ",".join(map(str, values))
            given = (f"method={method}", f"method.{option}={listed}", "max_nodes=paper", within)
            run("bench", "-m", *given, *options)
            for value in values:
                found = measured(folder / f"{method}-{value}")[method]
                rows.append({"method": method, option: value} | {name: found[name] for name in KEPT})
    best = max(row["speedup"] or 0.0 for row in rows if row["method"] == "speculative")
    return [row | {"over_best_fixed_gamma": row["speedup"] / best if row["speedup"] and best else None} for row in rows]


def variants(folder: Path, group: str, methods: Sequence[str], options: Sequence[str]) -> list[dict]:
    """Measure variants of a method side by side in one benchmark."""
    given = (f"variants={group}", f"methods=[{','.join(methods)}]", "max_nodes=paper", f"out={folder}/bench")
    if not (folder / "bench" / "results.json").is_file():
        run("bench", *given, *options)
    found = measured(folder / "bench")
    return [{"method": name} | {key: one[key] for key in KEPT} for name, one in found.items()]


def trainings(folder: Path, options: Sequence[str]) -> list[dict]:
    """Train every variant of SPIRe's drafter and a vanilla one, and list the tau that each training measured."""
    chosen = "${hydra:runtime.choices.ablation}"
    paths = (f"run_dir={folder}/runs/{chosen}", f"out={folder}/drafters/{chosen}")
    run("train", "-m", "+exp=spire", "previous_state=false", f"+ablation={TRAINED}", *EQUAL, *paths, *options)
    paths = (f"run_dir={folder}/runs/vanilla", f"out={folder}/drafters/vanilla")
    run("train", "-m", "+exp=vanilla", *EQUAL, *paths, *options)
    rows = []
    for name in (*TRAINED.split(","), "vanilla"):
        result = json.loads((folder / "runs" / name / "result.json").read_text())
        drafter = "speculative" if name == "vanilla" else "spire"
        changed = read_yaml(folder / "runs" / name / "config.yaml")
        rows.append({"ablation": name, "loss": changed.get("loss")} | dict(result["tau"][drafter].items()))
    return rows


def engines(folder: Path, options: Sequence[str]) -> list[dict]:
    """Train as usual and for an engine, and list the tau that validation computed for each seed."""
    taus: dict[str, list[float]] = {"usual": [], "engine": []}
    for seed in SEEDS:
        for name, chosen in zip(taus, ((), ("+engine=vllm",)), strict=True):
            paths = (f"run_dir={folder}/runs/{name}-{seed}", f"out={folder}/drafters/{name}-{seed}")
            run("train", "-m", "+exp=spire", *chosen, f"seed={seed}", *SHORT, *paths, *options)
            result = json.loads((folder / "runs" / f"{name}-{seed}" / "result.json").read_text())
            taus[name].append(result["metrics"]["eval/tau_expected"])
    rows = [{"trained": name, "tau": found} for name, found in taus.items()]
    more = np.subtract(rows[1]["tau"], rows[0]["tau"])
    rows[1]["difference"] = [float(more.mean()), float(T_OF_THREE * more.std(ddof=1) / len(SEEDS) ** 0.5)]
    return rows


def run(command: str, *arguments: str) -> None:
    """Run a command of spectrain, and end with its exit code where it fails."""
    done = subprocess.run([sys.executable, "-m", f"spectrain.{command}", *arguments])
    if done.returncode:
        raise SystemExit(done.returncode)


def measured(folder: Path) -> dict[str, dict]:
    return json.loads((folder / "results.json").read_text())["methods"]


def shown(value: object) -> str:
    if isinstance(value, Mapping):  # an estimate
        value = [value.get("value"), value.get("low"), value.get("high")]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(shown(each) for each in value)}]"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def figure_of(rows: Sequence[Mapping]) -> Figure:
    """Draw the discard rate over the verification rate, and the speed over the draft length, of every setting."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    rates, speeds = figure.subplots(1, 2)
    for method, style in STYLES.items():
        own = [row for row in rows if row["method"] == method]
        rates.plot([r["verification_rate"] for r in own], [r["discard_rate"] for r in own], style, label=method)
        speeds.plot([r["mean_accepted"] for r in own], [r["speedup"] for r in own], style, label=method)
    rates.set(xlabel="verification rate (target calls per token)", ylabel="discard rate (discarded tokens per token)")
    speeds.set(xlabel="acceptance length (tau)", ylabel="speedup over plain decoding")
    speeds.axhline(1.0, color="gray", lw=0.8)
    rates.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
