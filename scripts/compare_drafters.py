"""Train each kind of drafter on the same tokens with as many parameters, and measure them side by side.

    python scripts/compare_drafters.py target=smollm2 activations=<store> prompts=gsm8k.jsonl,humaneval.jsonl steps=600

`activations` is a store of `data_prep.activations layers=[2,15,27,28,29]` (for a target of 30 blocks). SPIRe has two
blocks, EAGLE-3 one with an MLP twice as wide, DFlash two; all draft the 8,192 most frequent tokens, and each token is
learned at one depth per epoch. Further arguments are options of each training. They lie in runs/drafters/; those that
are finished are not repeated. The result is docs/results/drafters.json, which docs/results/tables.py turns into the
table of docs/benchmarks.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ablations import run
from safetensors import safe_open

from spectrain.stores.environment import cpu_name, date_now
from spectrain.stores.files import load_json, write_json

WORK = Path("runs/drafters")
RESULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "drafters.json"
EAGLE = "+exp=eagle3", "intermediate_size=3072", "loss=mixed", "roots_every=4"
KINDS = {  # name in the table -> its folder, and the options of its training
    "SPIRe": ("spire", "+exp=spire", "n_layer=2"),
    "EAGLE-3": ("eagle3", *EAGLE),
    "EAGLE-3, `init=pruned`": ("eagle3_pruned", *EAGLE, "init=pruned"),
    "DFlash": ("dflash", "+exp=dflash", "n_layer=2", "block_tokens=8", "target_layers=[2,15,27]", "loss=mixed"),
}
SAMPLINGS = {"greedy": "greedy", "T = 0.8": "t08"}
OWN = ("target", "activations", "prompts", "steps", "beside")
BENCH = "limit=8", "max_new_tokens=64"


def main() -> None:
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    others = [argument for argument in sys.argv[1:] if argument.partition("=")[0] not in OWN]
    steps, target = given.get("steps", "600"), given.get("target", "smollm2")
    folders = {name: train(target, given["activations"], steps, *options, *others) for name, options in KINDS.items()}
    if shipped := given.get("beside"):
        folders["SPIRe as shipped"] = shipped
    columns, rows = ["", "parameters", "expected tau"], {name: facts(path) for name, path in folders.items()}
    for prompts in given["prompts"].split(","):
        for title, sampling in SAMPLINGS.items():
            found = bench(target, folders, prompts, sampling)
            columns.append(f"{Path(prompts).stem}, {title}")
            for name, path in folders.items():
                rows[name].append(cell(found["methods"][str(path)]))
    names = {"activations": "<store>", "prompts": ",".join(Path(one).name for one in given["prompts"].split(","))}
    typed = " ".join(f"{key}={value}" for key, value in (given | names).items())
    result = {
        "date": date_now(),
        "machine": cpu_name(),
        "model": Path(target).name,
        "dtype": found["dtype"],
        "batch": 1,
    }
    result |= {
        "command": f"python scripts/compare_drafters.py {typed}",
        "note": f"Options of bench: {' '.join(BENCH)}.",
    }
    write_json(RESULT, result | {"columns": columns, "rows": [[name, *row] for name, row in rows.items()]})


def train(target: str, activations: str, steps: str, name: str, *options: str) -> Path:
    """Train one kind, unless that is done, and return its export."""
    out = WORK / name
    if not (out / "spectrain.json").is_file():
        data = f"data.path={activations}", "data=offline", "data.batch_size=4", "data.val_rows=48"
        paths = f"run_dir={WORK / 'runs' / name}", f"out={out}", f"max_steps={steps}", "draft_vocab=8192"
        paths += f"trainer.val_check_interval={steps}", "select.every=0", "tau.contexts=4", "tau.context_tokens=[96]"
        run("train", f"target={target}", *data, *paths, *options)
    return out


def bench(target: str, folders: dict, prompts: str, sampling: str) -> dict:
    out = WORK / f"bench-{Path(prompts).stem}-{sampling}"
    if not (out / "results.json").is_file():
        asked = f"methods=[{','.join(map(str, folders.values()))}]", f"prompts={prompts}", f"sampling={sampling}"
        run("bench", f"target={target}", *asked, *BENCH, f"out={out}")
    return load_json(out / "results.json")


def facts(folder: Path) -> list[str]:
    """Return the trained parameters without the unembedding, and the tau that held-out rows let expect."""
    trained = load_json(Path(folder) / "spectrain.json")["trained"]
    with safe_open(Path(folder) / "model.safetensors", "pt") as tensors:
        names = [name for name in tensors.keys() if name not in ("lm_head.weight", "d2t", "t2d", "kept")]  # noqa: SIM118
        n_parameters = sum(tensors.get_tensor(name).numel() for name in names)
    return [f"{n_parameters / 1e6:.2f} M", f"{trained['metrics']['eval/tau_expected']:.2f}"]


def cell(found: dict) -> str:
    if found["no_speedup"]:
        return found["no_speedup"]
    (low, high), tau = found["speedup_ci95"], found["mean_accepted"]
    return f"{found['speedup']:.2f} [{low:.2f}, {high:.2f}], {tau:.2f}"


if __name__ == "__main__":
    main()
