"""Time one drafting step of lookup methods, `propose` and `observe` of one row, at several context lengths.

    python scripts/bench_drafting.py pystdlib-8l [--methods pld anpd logitspec --contexts 500 2000 8000 --threads 1]

The text is the source of the Python standard library. The row follows it: correct drafts are accepted, as if the target
had written the file. No target runs. Its logits are made up from the text's log frequencies and Gumbel noise, so that
likely tokens are tokens of the text. Methods take turns, text by text, with the options of `conf/method/`. The output
is the median over steps in microseconds, with its 95 % bootstrap interval (steps resampled).
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from spectrain.decoding import Context, Drafter, DraftTree, KVCache, Sampling, TargetModel, TargetOutput, Verified
from spectrain.decoding.loading import load_target
from spectrain.measure.statistics import median
from spectrain.methods.registry import build_method, method_config, with_papers_nodes
from spectrain.stores.locations import bundled_folder

WARM_UP = 5  # steps of each text
MOST_EMITTED = 40  # tokens of a step, more than any tree is deep
EVICTED_BYTES = 128 * 2**20  # more than a last-level cache holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder, Hugging Face id or bundled name; its tokenizer and vocabulary are used")
    parser.add_argument("--methods", nargs="+", default=["pld", "anpd", "logitspec"], help="names in conf/method/")
    parser.add_argument("--contexts", nargs="+", type=int, default=[500, 2000, 8000], help="tokens of the prompt")
    parser.add_argument("--texts", type=int, default=6, help="texts of each length")
    parser.add_argument("--steps", type=int, default=60, help=f"timed steps of each text; {WARM_UP} more warm up")
    parser.add_argument("--vocab-size", type=int, help="entries of the logits; default: the target's")
    parser.add_argument("--cold", action="store_true", help="flush the CPU caches each step, as a large target does")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.vocab_size and "spectra_core" in options.methods:
        parser.error("spectra_core keeps a mask of the target's own vocabulary; leave --vocab-size out")
    torch.set_num_threads(options.threads)
    target = load_target(bundled_folder(options.target) or options.target, device="cpu")
    configs = {name: with_papers_nodes(method_config(name)) for name in options.methods}
    drafters = {name: build_method(config, target, {}) for name, config in configs.items()}
    n_rows = 64 + max(drafter.max_nodes for drafter in drafters.values())
    evicted = torch.zeros(EVICTED_BYTES if options.cold else 0, dtype=torch.uint8)

    steps_us = defaultdict(list)
    for n_context in options.contexts:
        n_tokens = n_context + MOST_EMITTED * (options.steps + WARM_UP)
        for text in track(list(texts(target, n_tokens, options.texts)), f"{n_context} tokens"):
            logits = made_up_logits(text, n_rows, options.vocab_size or target.vocab_size)
            for name, drafter in drafters.items():
                row = WalkingRow(target, drafter, text, n_context, logits)
                measured = [row.step_us(evicted) for _ in range(WARM_UP + options.steps)]
                steps_us[name, n_context] += measured[WARM_UP:]
    table = Table("us per step and row", *(f"{n} tokens" for n in options.contexts))
    for name in options.methods:
        medians = [median(steps_us[name, n]) for n in options.contexts]
        table.add_row(name, *(f"{m.value:.0f} [{m.low:.0f}, {m.high:.0f}]" for m in medians))
    Console().print(table)


def texts(target: TargetModel, n_tokens: int, n_texts: int) -> Iterator[list[int]]:
    """Yield texts of n_tokens token ids, each made of consecutive modules of the standard library."""
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if n_texts == 0:
            return
        tokens += target.tokenizer(path.read_text(encoding="utf-8", errors="ignore"))["input_ids"]
        if len(tokens) >= n_tokens:
            yield tokens[:n_tokens]
            tokens, n_texts = [], n_texts - 1


def made_up_logits(text: list[int], n_rows: int, vocab_size: int) -> Tensor:
    """Return [n_rows, vocab_size] float32: log frequencies and Gumbel noise."""
    generator = torch.Generator().manual_seed(0)
    frequency = torch.bincount(torch.tensor(text), minlength=vocab_size)[:vocab_size] + 0.01
    uniform = torch.rand(n_rows, vocab_size, generator=generator).clamp_min(1e-9)
    return frequency.log() - (-uniform.log()).log()


class WalkingRow:
    """One row whose text is known; its first n_context tokens are the prompt.

    `target` is given to the drafter but never run. Each step takes other rows of `logits` [n, V] for its output.
    """

    def __init__(self, target: TargetModel, drafter: Drafter, text: list[int], n_context: int, logits: Tensor):
        self.drafter, self.text, self.logits, self.n_steps = drafter, text, logits, 0
        self.context = Context(Sampling(), "cpu")
        self.context.append([text[:n_context]], len(text) - n_context, [torch.Generator().manual_seed(0)])
        self.context.root(range(1), torch.tensor([text[n_context]]), logits[:1])
        drafter.start(target, KVCache(1))
        output = TargetOutput(logits[None, :1], None, torch.arange(n_context)[None])
        drafter.prefill(self.context, output, range(1))

    def step_us(self, evicted: Tensor) -> float:
        """Return the microseconds of `propose` and `follow`; write all of `evicted` in between, as a target would."""
        context, drafter = self.context, self.drafter
        started = time.perf_counter()
        tree = drafter.propose(context)
        taken_s = time.perf_counter() - started

        evicted += 1
        n_tokens = context.n_tokens[0]
        verified = follow(tree, self.text[n_tokens:])
        first = self.n_steps % (len(self.logits) - tree.shape[1])
        logits = self.logits[None, first : first + tree.shape[1]]
        output = TargetOutput(logits, None, tree.depth + n_tokens - 1)
        emitted = self.text[n_tokens : n_tokens + int(verified.accepted[0]) + 1]
        last = logits[:, 0].clone()
        last[0, emitted[-1]] = last.max() + 1  # the root was the likeliest token
        self.n_steps += 1

        started = time.perf_counter()
        drafter.follow(context, tree, output, verified, last, [emitted])
        return 1e6 * (taken_s + time.perf_counter() - started)


def follow(tree: DraftTree, text: list[int]) -> Verified:
    """Accept the path of the tree that spells the text; the token after it is the bonus."""
    tokens, parents, drafted = tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.drafted[0].tolist()
    children = {(parents[i], tokens[i]): i for i in range(1, len(tokens)) if drafted[i]}
    path = [0]
    while (path[-1], text[len(path) - 1]) in children:
        path.append(children[path[-1], text[len(path) - 1]])
    padded = path + [-1] * (len(tokens) - len(path))
    return Verified(torch.tensor([padded]), torch.tensor([len(path) - 1]), torch.tensor([text[len(path) - 1]]))


if __name__ == "__main__":
    main()
