"""Train each kind of drafter on the same tokens with as many parameters, and measure them side by side.

    python scripts/compare_drafters.py target=smollm2 activations=<store> prompts=gsm8k.jsonl,humaneval.jsonl steps=600

`activations` is a store of `data_prep.activations layers=[2,15,27,28,29]` (for a target of 30 blocks). SPIRe has two
blocks, EAGLE-3 one with an MLP twice as wide, DFlash two, the vanilla drafter nine of half the width; all but the last
draft the 8,192 most frequent tokens, and each token is learned at one depth per epoch. Trees of SPIRe and EAGLE-3 with
what SSSD finds stand beside them. `long` is a file of long texts: pieces of its articles of several lengths, with a
question, give the table by the length of the context, where each step drafts four tokens. `kinds=` names the folders
of those that are trained, else all are. `corpus` is the file of the store's texts, which the vanilla drafter reads.
Further arguments are options of each training. They lie in runs/drafters/; those that are finished are not repeated.
The results are drafters.json and drafters_contexts.json of docs/results, which docs/results/tables.py turns into
tables of docs/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ablations import run
from safetensors import safe_open
from transformers import AutoTokenizer

from spectrain.stores.environment import cpu_name, date_now
from spectrain.stores.files import load_json, write_json

WORK = Path("runs/drafters")
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
EAGLE = "+exp=eagle3", "intermediate_size=3072", "loss=mixed", "roots_every=4", "draft_vocab=8192"
KINDS = {  # name in the table -> its folder, and the options of its training
    "SPIRe": ("spire", "+exp=spire", "n_layer=2", "draft_vocab=8192"),
    "EAGLE-3": ("eagle3", *EAGLE),
    "EAGLE-3, window 64": ("eagle3_window", *EAGLE, "window_tokens=64"),
    "EAGLE-3, `init=random`": ("eagle3_random", *EAGLE, "init=random"),
    "DFlash": (
        *("dflash", "+exp=dflash", "n_layer=2", "block_tokens=8", "target_layers=[2,15,27]", "loss=mixed"),
        "draft_vocab=8192",
    ),
    "vanilla": ("vanilla", "+exp=vanilla", "n_layer=9"),
}
TREES = {"SPIRe with SSSD": ("spire_sssd", "SPIRe"), "EAGLE-3 with SSSD": ("eagle3_sssd", "EAGLE-3")}
CHAINS = {"vanilla": "speculative", "eagle3": "eagle3", "dflash": "dflash"}  # a folder's name, and else spire
UNEMBEDDING = "lm_head.weight", "model.embed_tokens.weight", "d2t", "t2d", "kept"  # a vanilla drafter's is tied
SAMPLINGS = {"greedy": "greedy", "T = 0.8": "t08"}
OWN = ("target", "activations", "prompts", "long", "steps", "beside", "kinds", "corpus")
BENCH = "limit=8", "max_new_tokens=64"
LENGTHS = (256, 1024, 4096, 7900)  # tokens of long contexts
EACH = 2  # long contexts of each length
GAMMA, NEW_TOKENS = 4, "max_new_tokens=96"  # of long contexts


def main() -> None:
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    others = [argument for argument in sys.argv[1:] if argument.partition("=")[0] not in OWN]
    steps, target = given.get("steps", "600"), given.get("target", "smollm2")
    chosen = given["kinds"].split(",") if "kinds" in given else [folder for folder, *_ in KINDS.values()]
    data = {"activations": given["activations"], "corpus": given.get("corpus")}
    kinds = {name: options for name, options in KINDS.items() if options[0] in chosen}
    folders = {name: train(target, data, steps, *options, *others) for name, options in kinds.items()}
    if shipped := given.get("beside"):
        folders["SPIRe as shipped"] = shipped
    columns, rows = ["", "parameters", "expected tau"], {name: facts(path) for name, path in folders.items()}
    rows |= {name: ["", ""] for name in TREES}
    for prompts in given["prompts"].split(","):
        for title, sampling in SAMPLINGS.items():
            trees = {name: {"method": tree, "drafter": folders[of]} for name, (tree, of) in TREES.items()}
            found = bench(target, folders, trees, prompts, *BENCH, f"sampling={sampling}")
            columns.append(f"{Path(prompts).stem}, {title}")
            for name, methods in found["methods"].items():
                rows[name].append(cell(methods))
    save("drafters", given, found, f"Options of bench: {' '.join(BENCH)}.", columns, rows)
    if long := given.get("long"):
        by_length, columns = {name: [] for name in folders}, ["tokens of the context", *map(str, LENGTHS)]
        chains = {
            name: {"method": CHAINS.get(Path(path).name.split("_")[0], "spire"), "drafter": path, "gamma": GAMMA}
            for name, path in folders.items()
        }
        for length in LENGTHS:
            found = bench(target, {}, chains, str(pieces(target, long, length)), NEW_TOKENS)
            for name, methods in found["methods"].items():
                by_length[name].append(cell(methods))
        note = f"{EACH} contexts of each length, {GAMMA} drafted tokens in each step; options of bench: {NEW_TOKENS}."
        save("drafters_contexts", given, found, note, columns, by_length)


def save(name: str, given: dict, found: dict, note: str, columns: list[str], rows: dict[str, list[str]]) -> None:
    named = {key: Path(given[key]).name for key in ("long", "corpus") if key in given}
    named |= {"activations": "<store>", "prompts": ",".join(Path(one).name for one in given["prompts"].split(","))}
    typed = " ".join(f"{key}={value}" for key, value in (given | named).items())
    where = {"date": date_now(), "machine": cpu_name(), "model": Path(given.get("target", "smollm2")).name}
    how = {"command": f"python scripts/compare_drafters.py {typed}", "note": note}
    result = where | {"dtype": found["dtype"], "batch": 1} | how
    write_json(
        RESULTS / f"{name}.json", result | {"columns": columns, "rows": [[key, *row] for key, row in rows.items()]}
    )


def train(target: str, given: dict[str, str | None], steps: str, name: str, *options: str) -> Path:
    """Train one kind, unless that is done, and return its export."""
    out = WORK / name
    if not (out / "spectrain.json").is_file():
        data = "data.batch_size=4", "data.val_rows=48"
        if name == "vanilla":  # which reads texts
            data += f"corpus={given['corpus']}", "data.row_tokens=512", "data.document_mask=true"
        else:
            data += f"data.path={given['activations']}", "data=offline"
        paths = f"run_dir={WORK / 'runs' / name}", f"out={out}", f"max_steps={steps}"
        paths += f"trainer.val_check_interval={steps}", "select.every=0", "tau.contexts=4", "tau.context_tokens=[96]"
        run("train", f"target={target}", *data, *paths, *options)
    return out


def bench(target: str, folders: dict, variants: dict[str, dict], prompts: str, *options: str) -> dict:
    """Return the results of drafters and of variants of methods, by their names in the table."""
    out = WORK / "-".join(
        ["bench", Path(prompts).stem, *(one.rpartition("=")[2] for one in options if "sampling" in one)]
    )
    names = {str(path): name for name, path in folders.items()}
    names |= {f"{own['method']}_{i}": name for i, (name, own) in enumerate(variants.items())}
    if not (out / "results.json").is_file():
        given = [
            f"+variants.{own['method']}_{i}={{{','.join(f'{key}:{value}' for key, value in own.items())}}}"
            for i, own in enumerate(variants.values())
        ]
        run(
            "bench",
            f"target={target}",
            f"methods=[{','.join(names)}]",
            *given,
            f"prompts={prompts}",
            *options,
            f"out={out}",
        )
    found = load_json(out / "results.json")
    methods = {names[key]: one for key, one in found["methods"].items() if key in names}
    return found | {"methods": methods}


def pieces(target: str, long: str, length: int) -> Path:
    """Write questions about texts of so many tokens, template included, and return their file."""
    file, tokenizer = WORK / f"contexts-{length}.jsonl", AutoTokenizer.from_pretrained(target)
    texts = [json.loads(line)["turns"][0] for line in Path(long).read_text().splitlines()]
    ids, asked = tokenizer("\n\n".join(texts))["input_ids"], "Summarize this text.\n\n"
    room = length - 48  # for the template and what is asked
    questions = [
        {
            "question_id": n,
            "category": str(length),
            "turns": [asked + tokenizer.decode(ids[n * 9000 : n * 9000 + room])],
        }
        for n in range(EACH)
    ]
    file.write_text("".join(json.dumps(one) + "\n" for one in questions))
    return file


def facts(folder: Path) -> list[str]:
    """Return the trained parameters without the unembedding, and the tau that held-out rows let expect."""
    trained = load_json(Path(folder) / "spectrain.json")["trained"]
    with safe_open(Path(folder) / "model.safetensors", "pt") as tensors:
        names = [name for name in tensors.keys() if name not in UNEMBEDDING]  # noqa: SIM118
        n_parameters = sum(tensors.get_tensor(name).numel() for name in names)
    return [f"{n_parameters / 1e6:.2f} M", f"{trained['metrics']['eval/tau_expected']:.2f}"]


def cell(found: dict) -> str:
    if found["no_speedup"]:
        return found["no_speedup"]
    (low, high), tau = found["speedup_ci95"], found["mean_accepted"]
    return f"{found['speedup']:.2f} [{low:.2f}, {high:.2f}], {tau:.2f}"


if __name__ == "__main__":
    main()
