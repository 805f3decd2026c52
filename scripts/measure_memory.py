"""Measure the peak memory of the commands that read large files: a datastore of much text, a bench of many prompts.

    python scripts/measure_memory.py datastore megabytes=500 [keep=null] [texts=<folder of other texts>]
    python scripts/measure_memory.py bench megabytes=500
    python scripts/measure_memory.py datastore megabytes=20 keep=0.5    # with perplexities, by which documents are kept

Needs psutil. Writes the input below `folder`, runs the command there on one CPU thread, and prints its peak resident
memory: of its largest process, and of all its processes together, sampled ten times per second. The text is that of
the given files, repeated with a number in each document, so that no document is a duplicate.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psutil
from omegaconf import OmegaConf

SAMPLE_S = 0.1
ROW_CHARACTERS = 1000  # so that a row fits the context of the bundled target
DEFAULTS = {"megabytes": 500, "keep": None, "folder": None, "texts": None}


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else ""
    options = OmegaConf.merge(DEFAULTS, OmegaConf.from_cli(sys.argv[2:]))
    if kind not in COMMANDS:
        raise SystemExit(f"give one of {', '.join(COMMANDS)} first")
    folder = Path(tempfile.mkdtemp(prefix="memory-", dir=options.folder))
    try:
        file = folder / "rows.jsonl"
        write_rows(file, int(options.megabytes * 1e6), documents(options.texts))
        command = [sys.executable, "-m", *COMMANDS[kind](file, options)]
        print(" ".join(command[1:]), flush=True)
        code, elapsed_s, largest, together = run(command, folder)
    finally:
        shutil.rmtree(folder)
    text_mb = f"{options.megabytes} MB of rows, keep={OmegaConf.to_container(options)['keep']}"
    print(f"{kind}: {text_mb}: {largest / 1e6:.0f} MB, all processes {together / 1e6:.0f} MB, {elapsed_s:.0f} s")
    raise SystemExit(code)


def datastore(file: Path, options: dict) -> list[str]:
    keep = "null" if options.keep is None else options.keep
    return ["data_prep.datastore", f"corpus={file}", f"keep={keep}", "out=store", "target.device=cpu"]


def bench(file: Path, options: dict) -> list[str]:
    short = ("limit=2", "max_new_tokens=16", "methods=[pld]")
    return ["spectrain.bench", f"prompts={file}", *short, "out=bench", "target.device=cpu"]


COMMANDS = {"datastore": datastore, "bench": bench}


def documents(texts: str | None) -> Iterator[str]:
    """Yield the files of a folder that are UTF-8, the lines of its .jsonl files one by one, over and over."""
    root = Path(texts or sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*") if file.suffix in (".py", ".md", ".txt", ".jsonl"))
    for _ in count():
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            yield from text.splitlines() if file.suffix == ".jsonl" else [text]


def write_rows(file: Path, n_bytes: int, texts: Iterator[str]) -> None:
    with file.open("w", encoding="utf-8") as rows:
        for number, text in enumerate(texts):
            if rows.tell() >= n_bytes:
                break
            rows.write(json.dumps({"prompt": f"{text[:ROW_CHARACTERS]}\n# {number}"}) + "\n")


def run(command: list[str], folder: Path) -> tuple[int, float, int, int]:
    """Run a command. Returns its exit code, seconds, and the peak bytes of its largest process and of all together."""
    start_s, largest, together = time.monotonic(), 0, 0
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    process = psutil.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        sizes = [process.memory_info().rss]
        for child in process.children(recursive=True):
            try:
                sizes.append(child.memory_info().rss)
            except psutil.NoSuchProcess:
                continue
        largest, together = max(largest, *sizes), max(together, sum(sizes))
        time.sleep(SAMPLE_S)
    return process.returncode, time.monotonic() - start_s, largest, together


if __name__ == "__main__":
    main()
