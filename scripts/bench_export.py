"""Measure exported folders: the time to open them, whether a new export of a run equals the first, and the proposer.

    python scripts/bench_export.py                                             # short runs on the bundled target
    python scripts/bench_export.py --target <folder> --folders exported/spire exported/sssd
    python scripts/bench_export.py --target <folder> --runs runs/spire-1f0c93ab --folders checkpoints/spire-1f0c93ab

Each folder is opened in fresh processes. Imports, target and `load_method` are timed separately, as medians, the last
also in processor seconds, which a busy machine does not change. Runs are exported again and compared with the folders
that training exported: the text and the drafts accepted in every step must be equal. Without folders and runs, some are
made: a few steps of SPIRe and vanilla drafters, one of them under DeepSpeed on a CPU rank, and a lookup method over the
standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from spectrain import load_method
from spectrain.decoding import TargetModel, generate, load_target
from spectrain.models.artifacts import read_manifest
from spectrain.serving.vllm_proposer import VARIABLE, LookupProposer
from spectrain.stores.environment import date_of, environment
from spectrain.stores.locations import bundled_folder

PROMPTS = (
    "def read_config(path):",
    "class Server:\n    def __init__(self",
    "import os\nimport sys\n\n",
    "for i in range(",
)
NEW_TOKENS = 64
DRAFT_TOKENS = 8  # of the proposer
SHORT = "max_steps=3 corpus.max_documents=120 data.row_tokens=256 data.batch_size=2 data.val_rows=2 select.every=0"
SHORT += " tau.context_tokens=[64] tau.contexts=1 tau.new_tokens=4 tau.timed_contexts=1 tau.temperatures=[0.0]"
SHORT += " trainer.accelerator=cpu trainer.precision=32-true"
TIMED = """
import json, sys, time
started = time.perf_counter()
from spectrain.decoding import load_target
from spectrain import load_method
imported = time.perf_counter()
target = load_target(sys.argv[1], device="cpu")
opened, busy = time.perf_counter(), time.process_time()
load_method(sys.argv[2], target)
loaded = time.perf_counter()
print(json.dumps([imported - started, opened - imported, loaded - opened, time.process_time() - busy]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="pystdlib-8l")
    parser.add_argument("--folders", nargs="*", type=Path, default=[])
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help="of which --folders hold the first exports")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON with everything measured")
    args = parser.parse_args()
    target = str(bundled_folder(args.target) or args.target)
    with tempfile.TemporaryDirectory() as scratch:
        folders, runs = list(args.folders), list(args.runs)
        if not folders and not runs:
            folders, runs = short_runs(Path(scratch), args.target)
        pairs = list(zip(runs, folders, strict=False))
        again = [export_again(Path(scratch), run) for run, _ in pairs]
        opened = load_target(target, device="cpu")
        result = {
            "kind": "export",
            "command": " ".join(["python", *sys.argv]),
            "date": date_of(),
            "versions": environment(1),
            "threads": torch.get_num_threads(),
            "target": args.target,
            "load": {folder.name: load_s(target, folder, args.repeats) for folder in folders},
            "equal": {
                folder.name: says_the_same(opened, folder, other)
                for (_, folder), other in zip(pairs, again, strict=True)
            },
            "propose": {f.name: propose_s(opened, f, args.repeats) for f in folders if kind(f) == "lookup"},
        }
    show(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


def kind(folder: Path) -> str:
    return read_manifest(folder).kind


def command(folder: Path, line: str, **more: str) -> None:
    """Run a command of spectrain in a folder. Show its errors if it fails."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), **more}
    done = subprocess.run(
        [sys.executable, "-m", *line.split()], cwd=folder, env=environ, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"python -m {line}\n{done.stderr[-2000:]}")


def short_runs(scratch: Path, target: str) -> tuple[list[Path], list[Path]]:
    """Make exports by training, and return the runs of the first ones and the exports."""
    name = target if bundled_folder(target) else str(Path(target).resolve())
    for run, options in {
        "spire": "+exp=spire",
        "vanilla": "+exp=vanilla",
        "deepspeed": "+exp=spire trainer=deepspeed_zero2 trainer.devices=1",
    }.items():
        command(scratch, f"spectrain.train {options} target={name} {SHORT} run_dir={run} out={run}-export")
    command(scratch, f"data_prep.datastore target={name} keep=null corpus.max_documents=400 out=store")
    command(scratch, f"spectrain.export method=sssd target={name} datastore=store out=sssd")
    runs = [scratch / run for run in ("spire", "vanilla", "deepspeed")]
    return [*(scratch / f"{run.name}-export" for run in runs), scratch / "sssd"], runs


def export_again(scratch: Path, run: Path) -> Path:
    """Export a run from its newest checkpoint; DeepSpeed's pieces are joined."""
    out = scratch / f"{run.name}-again"
    command(scratch, f"spectrain.export run={run.resolve()} out={out} weights=last")
    return out


def load_s(target: str, folder: Path, repeats: int) -> dict[str, float]:
    """Return medians over fresh processes, in seconds."""
    found = []
    for _ in range(repeats):
        timed = [sys.executable, "-c", TIMED, target, str(folder)]
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        done = subprocess.run(timed, env=environ, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    medians = [statistics.median(values) for values in zip(*found, strict=True)]
    return {
        **dict(zip(("import_s", "target_s", "load_s", "load_cpu_s"), medians, strict=True)),
        "slowest_s": max(f[2] for f in found),
    }


def says_the_same(target: TargetModel, *folders: Path) -> dict[str, bool | float]:
    """Whether both write the same tokens and have the same drafts accepted in every step."""
    prompts = [target.tokenizer(text)["input_ids"] for text in PROMPTS]
    found = []
    for folder in folders:
        drafter = load_method(folder, target, max_nodes=5)  # not as many as pay, which clocks decide
        found.append(generate(target, drafter, prompts, NEW_TOKENS, batch_size=2, stop_token_ids=()))
    return {
        "tokens": [g.tokens for g in found[0]] == [g.tokens for g in found[1]],
        "drafts": [g.accepted for g in found[0]] == [g.accepted for g in found[1]],
        "accepted": sum(sum(g.accepted) for g in found[0]),
    }


def propose_s(target: TargetModel, folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Measure calls of the vLLM proposer in microseconds, by rows and tokens per row; each call adds one token."""
    os.environ[VARIABLE] = str(folder)
    source = np.array(target.tokenizer("\n".join(PROMPTS) * 400)["input_ids"], dtype=np.int32)
    found = {}
    for n_rows in (1, 8, 64):
        for n_tokens in (512, 4096):
            proposer = LookupProposer(
                SimpleNamespace(
                    speculative_config=SimpleNamespace(num_speculative_tokens=DRAFT_TOKENS),
                    model_config=SimpleNamespace(max_model_len=10**6),
                )
            )
            tokens = np.stack(
                [np.roll(np.array(source, dtype=np.int32), row)[: n_tokens + 200] for row in range(n_rows)]
            )
            lengths, times = np.full(n_rows, n_tokens, dtype=np.int32), []
            for _ in range(10 * repeats + 1):
                sampled = [[int(tokens[row, lengths[row] - 1])] for row in range(n_rows)]
                started = time.perf_counter()
                proposer.propose(sampled, lengths, tokens)
                times.append(time.perf_counter() - started)
                lengths += 1
            found[f"{n_rows} x {n_tokens}"] = {"first_us": 1e6 * times[0], "us": 1e6 * statistics.median(times[1:])}
    return found


def show(result: dict) -> None:
    console = Console()
    table = Table(title=f"opening an export for {result['target']}, seconds, medians of fresh processes")
    for column in ("folder", "imports", "target", "load_method", "slowest", "processor"):
        table.add_column(column, justify="left" if column == "folder" else "right")
    for name, found in result["load"].items():
        table.add_row(
            name, *(f"{found[key]:.2f}" for key in ("import_s", "target_s", "load_s", "slowest_s", "load_cpu_s"))
        )
    console.print(table)
    for name, found in result["equal"].items():
        same = "the same" if found["tokens"] and found["drafts"] else "NOT the same"
        console.print(f"{name}: {same} tokens and drafts as spectrain.export of its run ({found['accepted']} accepted)")
    for name, cells in result["propose"].items():
        for size, found in cells.items():
            first, later = (f"{found[key] / 1e3:.2f}" for key in ("first_us", "us"))
            console.print(f"{name}, {size} tokens: {later} ms per propose call, {first} ms for the first")


if __name__ == "__main__":
    main()
