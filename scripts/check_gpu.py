"""Check a machine with a GPU in at most eight minutes: are the results right, how fast is it, and where does time go.

    python scripts/check_gpu.py [--out runs/check-gpu] [--sections methods speed] [--tiny]

    tests       the tests marked `gpu`
    methods     every method on the bundled target; greedy float32 text must equal that of plain decoding
    graphs      the same with CUDA graphs, compared with eager execution
    speed       tokens/s on a random Llama of 1.2 billion parameters in bfloat16, beside Hugging Face `generate`
    profile     one decoding step: kernels, launches, waits and copies
    train_ddp, train_zero2      20 steps of SPIRe on all GPUs of the machine
    compiled    tokens/s of Hugging Face `generate` with a static cache, compiled

Each section is a process of its own with a time limit. A section that fails or runs out of time is a line of the table
and keeps the rows that it has measured. The exit code is then 1. What a section says is in <out>/<section>.log. Writes
check_gpu.json and check_gpu.md. Without a GPU, or with --tiny, all sizes are small and the whole takes a minute or two.
Drafters and datastores of the bundled target are taken from checkpoints/, and made untrained where none fits.
Needs the extra `test`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import gpu_sections
import torch
from gpu_sections import DEVICE, FULL, ON_GPU, ROOT, TINY, Row, Sizes
from pandas import DataFrame

from spectrain.cli import quiet_libraries
from spectrain.measure.tables import MISSING, as_markdown, fixed, show, size, table_of
from spectrain.stores.environment import TYPED_COMMAND, device_facts, provenance
from spectrain.stores.folder import write_json
from spectrain.stores.lines import RowFile
from spectrain.stores.writing import write_whole

BUDGET_S = 465  # of all sections; the rest of eight minutes is for imports and for writing
BUSY = 3  # times as long a section may take at small sizes, which may run beside other work on a CPU
SECTIONS = {  # what yields the rows, and its limit in seconds
    "tests": (gpu_sections.gpu_tests, 90),
    "methods": (gpu_sections.decode_methods, 70),
    "graphs": (gpu_sections.compare_graphs, 60),
    "speed": (gpu_sections.measure_speed, 90),
    "profile": (gpu_sections.profile_step, 40),
    "train_ddp": (partial(gpu_sections.train, trainer="ddp"), 60),
    "train_zero2": (partial(gpu_sections.train, trainer="deepspeed_zero2"), 60),
    "compiled": (gpu_sections.measure_compiled, 120),
}
COLUMNS = ("section", "what", "result", "s", "tokens/s", "tau", "ms", "calls", "peak memory", "note")


def main() -> int:
    args = parsed()
    if args.worker:
        work(args.worker[0], Path(args.worker[1]), TINY if args.tiny else FULL)
        return 0
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: --out={args.out} cannot be a folder ({error.strerror}); give another one", file=sys.stderr)
        return 2
    TYPED_COMMAND.set(shlex.join(["python", *sys.argv]))
    ends_s, sections = time.monotonic() + BUDGET_S, []
    with tempfile.TemporaryDirectory(prefix="check-gpu-") as folder:
        for name in args.sections:
            limit_s = SECTIONS[name][1] * (BUSY if args.tiny else 1)
            limit_s = max(0, min(limit_s, ends_s - time.monotonic()))
            sections.append(run_section(name, Path(folder), args.out, args.tiny, limit_s))
            print("{section}: {result} in {seconds:.0f} s. {note}".format(**sections[-1]), flush=True)
    device = {"device": device_facts(DEVICE, torch.float32)["device"], "gpus": torch.cuda.device_count()}
    found = {**provenance(), **device, "cuda": torch.version.cuda, "tiny": args.tiny, "sections": sections}
    write_json(args.out / "check_gpu.json", found)
    write_whole(args.out / "check_gpu.md", markdown(found))
    failed = [{"section": s["section"], **row} for s in sections for row in s["rows"] if row["result"] == "failed"]
    show([("failed rows", cells_of(failed))] if failed else [], 120, f"{args.out}/check_gpu.json, check_gpu.md")
    return int(any(section["result"] == "failed" for section in sections))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/check-gpu"), help="folder of the table and the logs")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--tiny", action="store_true", default=not ON_GPU, help="small sizes, as without a GPU")
    parser.add_argument("--worker", nargs=2, metavar=("SECTION", "FILE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def work(name: str, file: Path, sizes: Sizes) -> None:
    """Write the rows of a section as they are measured."""
    quiet_libraries()
    rows = RowFile(file, Row)
    for row in SECTIONS[name][0](sizes):
        rows.append(row)


def run_section(name: str, folder: Path, out: Path, tiny: bool, limit_s: float) -> dict:
    """Run a section in a process of its own; returns its result, seconds, rows, and why it ended too early.

    Args:
        name: of the section.
        folder: where it may leave files.
        out: where its log goes.
        tiny: whether sizes are small.
        limit_s: seconds after which it is killed, with all processes that it has started.
    """
    file, log = folder / f"{name}.jsonl", out / f"{name}.log"
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", name, str(file), *["--tiny"] * tiny]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"env": os.environ | {"PYTHONPATH": paths, "TMPDIR": str(folder)}, "start_new_session": True}
    began_s, note = time.monotonic(), ""
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, **settings)
        try:
            if process.wait(limit_s):
                lines = log.read_text(errors="replace").split("\n")
                note = next((line for line in reversed(lines) if line.strip()), f"exit code {process.returncode}")
        except BaseException as stop:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(stop, subprocess.TimeoutExpired):
                raise
            note = f"not done after {limit_s:.0f} s"
    rows = list(map(asdict, RowFile(file, Row).rows))
    results = {"failed"} if note else {row["result"] for row in rows}
    result = "failed" if "failed" in results else "ok" if "ok" in results else "skipped"
    return {"section": name, "result": result, "seconds": time.monotonic() - began_s, "note": note, "rows": rows}


def markdown(found: Mapping) -> str:
    """The table of all sections and their rows, below the date, the machine and the versions."""
    rows = []
    for section in found["sections"]:
        rows += [{**section, "what": "the whole"}, *section["rows"]]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    sizes = "small sizes" if found["tiny"] else "full sizes"
    facts = f"{found['date']}, {found['gpus']} GPUs, CUDA {found['cuda'] or 'missing'}, {versions}, {sizes}"
    return f"# `{found['command']}` on {found['device']}\n\n{facts}.\n\n{as_markdown(cells_of(rows))}"


def cells_of(rows: list[Mapping]) -> DataFrame:
    """Rows, and sections as rows, with their numbers as readers see them."""
    found = []
    for row in rows:
        numbers = {"s": fixed(row.get("seconds"), 1), "tokens/s": fixed(row.get("tokens_per_s"), 1)}
        numbers |= {
            "tau": fixed(row.get("tau"), 2),
            "ms": fixed(row.get("ms"), 3),
            "peak memory": size(row.get("peak_bytes")),
        }
        cells = {name: row.get(name, "") for name in COLUMNS} | numbers
        found.append(
            {name: "" if cell in (None, MISSING) else str(cell).replace("|", "/") for name, cell in cells.items()}
        )
    return table_of(found)


if __name__ == "__main__":
    raise SystemExit(main())
