"""Measure what an acceptance head costs in training and in decoding.

    python scripts/bench_heads.py --target <folder> --drafter <folder> --store <folder of data_prep.acceptance>

Training: whole steps of the head (mixing, one forward of the frozen drafter, the head's forward and backward, the
optimizer) and the drafter's forward alone take turns on the same batches. Decoding: draft steps with and without the
head take turns on the same context. Ratios compare neighbouring measurements and are medians with 95 % bootstrap
intervals.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from spectrain import load_target
from spectrain.decoding import DraftTree, KVCache, Sampling, TargetModel, fingerprint
from spectrain.errors import UserError
from spectrain.measure.statistics import Estimate, median
from spectrain.methods.specdecpp import open_drafter
from spectrain.methods.stopping import HeadStop
from spectrain.models.head import AcceptanceHead, DrafterFacts, HeadConfig, HeadFacts
from spectrain.stores.rows import open_acceptance
from spectrain.training.data import TextBatch, TextRows, text_rows
from spectrain.training.head import HeadTraining
from spectrain.training.optim import OptimizerSettings, build_optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder, hub id or smollm2")
    parser.add_argument("--drafter", required=True, help="folder of a vanilla drafter")
    parser.add_argument("--store", required=True, help="labels of this drafter by data_prep.acceptance")
    parser.add_argument("--batch", type=int, default=32, help="rows of a training step")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache of a timed draft step")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of training steps timed")
    parser.add_argument("--draft-pairs", type=int, default=300, help="pairs of draft steps timed")
    args = parser.parse_args()
    try:
        target = load_target(args.target)
        states = open_drafter(target, "vanilla", args.drafter).states
        store = open_acceptance(Path(args.store))
        prints = fingerprint(target.model, target.tokenizer), states.fingerprint()
        store.check_fits(*prints, None, target.vocab_size)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{args.drafter} for {args.target}, {target.dtype}, {torch.get_num_threads()} threads")
    rows = TextRows(text_rows(store.rows, target.max_positions))
    batches = [rows[list(range(i, i + args.batch))] for i in range(0, len(rows) - args.batch, args.batch)]
    drafter = DrafterFacts("vanilla", args.drafter, prints[1])
    for n_blocks in range(5):
        facts = HeadFacts(HeadConfig(states.hidden_size, n_blocks), drafter, Sampling(1.0), 6.0, mixing_share=0.15)
        module = HeadTraining(facts, states, target, OptimizerSettings())
        training = training_ratio(module, batches, args.pairs)
        drafting = drafting_share(states.model, module.head, args.context, args.draft_pairs)
        print(f"D={n_blocks}: training at {training} of the draft's throughput; head costs {drafting} of a draft step")


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def training_ratio(module: HeadTraining, batches: list[TextBatch], pairs: int) -> Estimate:
    """Throughput of head training over that of the draft's forward pass alone."""
    optimizer = build_optimizer(module.head.named_parameters(), module.optimizer_settings)

    def train(batch: TextBatch, epoch: int) -> None:
        hidden, labels = module.examples(batch, epoch)
        module.loss(module.head(hidden), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def forward(batch: TextBatch) -> None:
        module.states.hidden(batch.tokens, None)

    ratios = []
    for pair, batch in zip(range(pairs + 2), itertools.cycle(batches), strict=False):
        alone, whole = timed(lambda b=batch: forward(b)), timed(lambda b=batch, e=pair: train(b, e))
        ratios.append(alone / whole)
    return median(ratios[2:])


@torch.inference_mode()
def drafting_share(draft: TargetModel, head: AcceptanceHead, context: int, pairs: int) -> Estimate:
    """What judging adds to a draft step at batch 1, as a share of the step without it."""
    cache = KVCache(1)
    tokens = torch.randint(0, draft.vocab_size, (1, context))
    draft.prefill(tokens, [context], cache, range(1))
    tree, judging, stop = DraftTree.root_only(tokens[:, 0]), draft.with_hidden(), HeadStop(head, 0.5)
    row = SimpleNamespace(n_rows=1)

    def plain() -> None:
        logits = draft.score(tree, cache).logits[:, 0]
        logits.argmax(-1).tolist()  # a drawn token reaches the host with or without a head

    def judged() -> None:
        output = judging.score(tree, cache)
        output.logits[:, 0].argmax(-1).tolist()
        stop.begin(row)
        stop.read(1, output.hidden[:, 0])

    seconds = np.array([(timed(plain), timed(judged)) for _ in range(pairs + 20)])[20:]
    return median(seconds[:, 1] / seconds[:, 0] - 1)


if __name__ == "__main__":
    main()
