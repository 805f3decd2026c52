"""Whether one drafter of a target is accepted more than another: tau on the same held-out contexts, in pairs.

    python scripts/compare_drafters.py checkpoints/spire-bf16 checkpoints/spire-int8 --rows 256
    python scripts/compare_drafters.py spire=<folder> magicdec --context-tokens 256 512 960 --out <folder>

A drafter is a folder that training or spectrain.export wrote, with a name before it where its own says little, or
`magicdec`, which needs none; the first is what others are held to. All decode the same beginnings of held-out rows.
Every part that is done is kept in --out, so the same command goes on after an interruption and takes further drafters
in; drafters.json, drafters.md and drafters.png are then made from all of it.

tau: tokens a target forward; intervals are 95 % bootstraps that draw rows, for a difference both drafters' together.
One that holds 0 is unresolved.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from data_prep.corpus import STDLIB_HELD_OUT, pack, read_documents, rows_of
from spectrain.cli import bundled_folder
from spectrain.decoding import Drafter, TargetModel, fingerprint, load_target
from spectrain.environment import environment
from spectrain.errors import UserError
from spectrain.evaluation.drafter_comparison import Counts, Setting, compare, count
from spectrain.evaluation.drafter_report import Comparison, draw, markdown, render
from spectrain.methods import magicdec
from spectrain.methods.loading import load_method
from spectrain.store_folder import write_whole

PART_ROWS = 32  # decoded between two writes
MAGICDEC = "magicdec"


def main() -> None:
    args = parsed()
    try:
        target = load_target(bundled_folder(args.target) or args.target, args.dtype, args.device)
        comparison, console = compared(args, target), Console()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    console.print(render(comparison))
    if args.out:
        draw(args.out / "drafters.png", comparison)
        (args.out / "drafters.md").write_text(markdown(comparison))
        write_whole(args.out / "drafters.json", facts(args, target.device, comparison))
        console.print(f"{args.out}/drafters.json, drafters.md, drafters.png", style="dim")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", help="[name=]folder, or magicdec")
    parser.add_argument("--target", default="pystdlib-8l", help="folder, hub id or bundled name")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--corpus", default=None, help="file or folder; None: the standard library")
    parser.add_argument("--held-out-share", type=float, default=STDLIB_HELD_OUT, help="as in training")
    parser.add_argument("--also", nargs="*", default=[], help="files or folders that no training saw, all of them")
    parser.add_argument("--row-tokens", type=int, default=1024, help="as in training; a context begins a row")
    parser.add_argument("--context-tokens", nargs="+", type=int, default=[256])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--skip", type=int, default=48, help="first held-out rows: validation and selection saw them")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens, for all drafters")
    parser.add_argument("--out", type=Path, default=None, help="folder that keeps what is measured")
    return parser.parse_args()


def compared(args: argparse.Namespace, target: TargetModel) -> Comparison:
    """Raises UserError where a drafter is none of this target's, or there are no rows."""
    folders = dict(named(text) for text in args.drafters)
    rows = held_out_rows(args, target)
    settings = [Setting(length, t) for t in args.temperatures for length in args.context_tokens]
    counts = {}
    for name, folder in folders.items():
        counts[name] = counted(args, target, name, folder, rows, settings)
    return Comparison(compare(counts, next(iter(folders))), settings, len(rows), args.new_tokens, args.gamma)


def named(text: str) -> tuple[str, Path | None]:
    """A drafter's name, and its folder where it has one."""
    if text == MAGICDEC:
        return text, None
    name, _, folder = text.rpartition("=")
    return name or Path(folder).name, Path(folder)


def opened(target: TargetModel, folder: Path | None, gamma: int) -> Drafter:
    return magicdec.build(target, gamma) if folder is None else load_method(folder, target, gamma=gamma)


def held_out_rows(args: argparse.Namespace, target: TargetModel) -> list[list[int]]:
    """Held-out rows that neither training nor validation saw, then rows of the files that no training saw."""
    packed = pack(read_documents(args.corpus), target.tokenizer, args.row_tokens, args.held_out_share)
    rows = packed.held_out[args.skip :].tolist()
    for path in args.also:
        texts = [document.text for document in read_documents(path)]
        rows += rows_of(texts, target.tokenizer, args.row_tokens).tolist()
    if not rows:
        raise UserError(f"the corpus has {len(packed.held_out)} held-out rows, all of them skipped; lower --skip")
    longest = max(args.context_tokens)
    if longest > args.row_tokens:
        raise UserError(f"contexts of {longest} tokens do not fit rows of {args.row_tokens}; lower --context-tokens")
    return rows[: args.rows]


def counted(
    args: argparse.Namespace,
    target: TargetModel,
    name: str,
    folder: Path | None,
    rows: Sequence[Sequence[int]],
    settings: Sequence[Setting],
) -> Counts:
    """Counts of a drafter [R, 2] by setting: what --out holds, and the rest decoded now."""
    kept = Kept.open(args, target, name, folder)
    drafter = opened(target, folder, args.gamma)
    for start in range(0, len(rows), PART_ROWS):  # all settings part by part: an interrupted comparison has them all
        for setting in settings:
            done = len(kept.counts.get(setting.name, ()))
            part = rows[done : min(start + PART_ROWS, len(rows))]
            if part:
                found = count(target, drafter, part, setting, args.new_tokens, args.batch_size, done)
                kept.add(setting, found)
    return {setting.name: np.array(kept.counts[setting.name][: len(rows)]) for setting in settings}


class Kept:
    """What was counted of one drafter: a file in --out, replaced whole after each part."""

    def __init__(self, file: Path | None, made_of: dict, counts: dict[str, list]) -> None:
        self.file, self.made_of, self.counts = file, made_of, counts

    @classmethod
    def open(cls, args: argparse.Namespace, target: TargetModel, name: str, folder: Path | None) -> Kept:
        """Raises UserError where the file is of another drafter, target, or other contexts."""
        weights = folder and hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        made_of = {
            "weights": weights,
            "target": fingerprint(target.model, target.tokenizer),
            **{key: getattr(args, key) for key in CONTEXTS},
        }
        if args.out is None:
            return cls(None, made_of, {})
        file = args.out / "counts" / f"{name}.json"
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            return cls(file, made_of, {})
        kept = json.loads(file.read_text())
        if kept["made_of"] != json.loads(json.dumps(made_of)):
            raise UserError(f"{file} was counted of another drafter, target or other rows; give another --out")
        return cls(file, made_of, kept["counts"])

    def add(self, setting: Setting, found: np.ndarray) -> None:
        self.counts.setdefault(setting.name, []).extend(found.astype(int).tolist())
        if self.file is not None:
            write_whole(self.file, {"made_of": self.made_of, "counts": self.counts})


CONTEXTS = ("dtype", "corpus", "held_out_share", "also", "row_tokens", "skip", "new_tokens", "gamma")


def facts(args: argparse.Namespace, device: torch.device, comparison: Comparison) -> dict:
    return {
        "kind": "drafters",
        "command": f"python scripts/compare_drafters.py {' '.join(sys.argv[1:])}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "target": args.target,
        "dtype": args.dtype,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "versions": environment(1),
        **comparison.as_json(),
    }


if __name__ == "__main__":
    main()
