"""Compare the speed of perplexity scoring with the target's plain forward: tokens/s of both, and their ratio.

    python scripts/bench_perplexity.py pystdlib-8l corpus.jsonl [--fields text --rounds 15]

The plain forward has rows of equal length, as many tokens per batch as scoring, and computes all logits without reading
them. Both take turns. The output is the median over rounds of scored tokens/s over forwarded tokens/s, with its 95 %
interval. Scored tokens are counted once, so overlapping windows and padding count against scoring.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import islice

import numpy as np
import torch
from rich.console import Console

from data_prep.select import Scoring, batch_tokens, perplexities
from spectrain.decoding import TargetModel, load_target
from spectrain.measure.statistics import median
from spectrain.stores.locations import bundled_folder
from spectrain.stores.texts import read_documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder, Hugging Face id or bundled name")
    parser.add_argument("corpus", nargs="?", help="as corpus=; default: the standard library's sources")
    parser.add_argument("--fields", nargs="+")
    parser.add_argument("--documents", type=int, default=1024, help="scored together, as a part of a build")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument(
        "--row-tokens", type=int, help="of the plain forward; default: the documents' mean, at most the window"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    target = load_target(bundled_folder(options.target) or options.target, options.dtype, options.device)
    scoring = Scoring.of(target, None, None, options.batch_tokens)
    texts = [document.text for document in islice(read_documents(options.corpus, options.fields), options.documents)]
    encoded = target.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    documents = [np.array(ids, dtype=np.int64) for ids in encoded]
    ratios, rates = measure(target, documents, scoring, options)
    console = Console()
    n_long = sum(len(document) > scoring.window_tokens for document in documents)
    console.print(f"{len(documents)} documents, {sum(map(len, documents))} tokens, {n_long} longer than the window")
    for name, values in rates.items():
        console.print(f"{name}: {median(values).value:,.0f} tokens/s")
    console.print(f"ratio: {median(ratios)} ({len(ratios)} rounds)")


def measure(
    target: TargetModel, documents: list[np.ndarray], scoring: Scoring, options: argparse.Namespace
) -> tuple[list[float], dict[str, list[float]]]:
    n_tokens = sum(map(len, documents))
    mean = -(-n_tokens // len(documents))
    row_tokens = options.row_tokens or min(scoring.window_tokens, mean)
    n_rows = max(1, batch_tokens(scoring.batch_tokens, target.vocab_size) // row_tokens)
    n_batches = max(1, round(n_tokens / (n_rows * row_tokens)))
    rows = torch.randint(target.vocab_size, (n_rows, row_tokens), device=target.device)

    @torch.inference_mode()
    def forward() -> None:
        for _ in range(n_batches):
            target.forward(rows)

    rates: dict[str, list[float]] = {"scoring": [], "plain forward": []}
    for number in range(options.rounds + 1):
        scored = n_tokens / elapsed_s(lambda: perplexities(target, documents, scoring), target.device)
        forwarded = n_batches * n_rows * row_tokens / elapsed_s(forward, target.device)
        if number > 0:  # the first is the warm-up
            rates["scoring"].append(scored)
            rates["plain forward"].append(forwarded)
    ratios = [a / b for a, b in zip(rates["scoring"], rates["plain forward"], strict=True)]
    return ratios, rates


def elapsed_s(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
