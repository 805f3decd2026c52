"""Whether one drafter of a target is accepted more than another: tau on the same held-out contexts, in pairs.

    python scripts/compare_drafters.py checkpoints/spire-bf16 checkpoints/spire-int8 --contexts 256

Every folder that spectrain.train exported as a spire or vanilla drafter decodes the same beginnings of held-out rows.
tau: tokens a target forward; intervals are 95 % bootstraps that draw contexts, for a difference both drafters'
together. One that holds 0 is unresolved.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from data_prep.corpus import STDLIB_HELD_OUT, pack, read_documents
from spectrain.cli import bundled_folder
from spectrain.decoding import Drafter, Generation, Sampling, TargetModel, generate, load_target
from spectrain.errors import UserError
from spectrain.methods import speculative, spire
from spectrain.models.artifacts import read_manifest

RESAMPLES = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", type=Path, help="exported folders; the first is what others are held to")
    parser.add_argument("--target", default="pystdlib-8l", help="folder, hub id or bundled name")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--corpus", default=None, help="file or folder; None: the standard library")
    parser.add_argument("--held-out-share", type=float, default=STDLIB_HELD_OUT, help="as in training")
    parser.add_argument("--row-tokens", type=int, default=1024, help="as in training; a context begins a row")
    parser.add_argument("--context-tokens", type=int, default=256)
    parser.add_argument("--contexts", type=int, default=128)
    parser.add_argument("--skip", type=int, default=48, help="first held-out rows: validation and selection saw them")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens of a vanilla drafter")
    args = parser.parse_args()
    try:
        target = load_target(bundled_folder(args.target) or args.target, args.dtype, args.device)
        opened = {folder: open_exported(target, folder, args.gamma) for folder in args.drafters}
        contexts = held_out_contexts(args, target)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    table = Table(title=f"tau on {len(contexts)} held-out contexts of {args.context_tokens} tokens, in pairs")
    for head in ("drafter", "sampling", "tau", f"more than {args.drafters[0].name}"):
        table.add_column(head, no_wrap=True)
    for temperature in args.temperatures:
        counts = {f: counted(args, target, drafter, contexts, temperature) for f, drafter in opened.items()}
        first = counts[args.drafters[0]]
        for folder, own in counts.items():
            more = "" if folder == args.drafters[0] else describe(own, first)
            sampling = "greedy" if temperature == 0 else f"T={temperature:g}"
            table.add_row(folder.name, sampling, describe(own), more)
        table.add_section()
    Console(width=max(100, 60 + max(len(folder.name) for folder in args.drafters))).print(table)


def open_exported(target: TargetModel, folder: Path, gamma: int) -> Drafter:
    """Raises UserError where the folder is no drafter of this target."""
    if read_manifest(folder).kind == "spire":
        return spire.build(target, str(folder))
    return speculative.build(target, str(folder), gamma)


def held_out_contexts(args: argparse.Namespace, target: TargetModel) -> list[list[int]]:
    """Beginnings of held-out rows that neither training nor validation saw."""
    packed = pack(read_documents(args.corpus), target.tokenizer, args.row_tokens, args.held_out_share)
    chosen = packed.held_out[args.skip :][: args.contexts, : args.context_tokens]
    if not len(chosen):
        raise UserError(f"the corpus has {len(packed.held_out)} held-out rows, all of them skipped; lower --skip")
    return chosen.tolist()


def counted(
    args: argparse.Namespace, target: TargetModel, drafter: Drafter, contexts: list[list[int]], temperature: float
) -> np.ndarray:
    """[contexts, 2]: tokens after the first, and target forwards."""
    found: list[Generation] = generate(
        target,
        drafter,
        contexts,
        args.new_tokens,
        Sampling(temperature=temperature),
        seed=0,
        batch_size=args.batch_size,
        stop_token_ids=(),
    )
    return np.array([(len(one.tokens) - 1, one.target_forwards) for one in found], dtype=np.float64)


def describe(own: np.ndarray, other: np.ndarray | None = None) -> str:
    """tau, or how much more it is than another's, with its interval."""
    picks = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    value, drawn = tau(own.sum(0)), tau(own[picks].sum(1))
    if other is not None:
        value, drawn = value - tau(other.sum(0)), drawn - tau(other[picks].sum(1))
    low, high = np.quantile(drawn, [0.025, 0.975])
    sign = "" if other is None else "+"
    return f"{value:{sign}.3f} \\[{low:{sign}.3f}, {high:{sign}.3f}]"


def tau(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / sums[..., 1]


if __name__ == "__main__":
    main()
