"""Streams one continuation and says what speculation gained.

    python -m spectrain.generate method=spire prompt="def read_config(path):"

Tokens that a drafter guessed and the target accepted are coloured; the rest the target drew itself.
"""

from __future__ import annotations

import logging
from statistics import median

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from spectrain.cli import command, open_target
from spectrain.decoding import Drafter, Generation, Sampling, Source, TargetModel, generate
from spectrain.decoding.errors import UserError
from spectrain.measure.statistics import decode_s
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.registry import build_configured
from spectrain.stores.prompts import conversation_ids

log = logging.getLogger(__name__)

COLOURS = {
    Source.FORWARD: "cyan",
    Source.BACKWARD: "magenta",
    Source.INPUT: "yellow",
    Source.DATASTORE: "blue",
    Source.LOGITS: "red",
    Source.DRAFT: "green",
}
TIMED_RUNS = 3


def main(cfg: DictConfig) -> None:
    if not str(cfg.prompt).strip():
        raise UserError('prompt is empty; give prompt="some text"')
    sampling = Sampling.from_options(cfg.sampling)
    target = open_target(cfg)
    drafter = build_configured(cfg, target, sampling)
    prompt = conversation_ids(target.tokenizer, [str(cfg.prompt)], [], cfg.chat)
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(str(cfg.prompt), style="dim"), end="")
    printer = StreamPrinter(console, target.tokenizer)
    generation = run(cfg, target, drafter, prompt, sampling, printer)
    console.print()
    report(console, generation)
    if cfg.baseline:
        rates = timed(cfg, target, {"this method": drafter, "autoregressive": Autoregressive()}, prompt, sampling)
        ours, base = rates["this method"], rates["autoregressive"]
        console.print(f"{ours:.0f} tokens/s, {ours / base:.2f}x autoregressive decoding ({base:.0f} tokens/s)")


def run(cfg: DictConfig, target: TargetModel, drafter: Drafter, prompt: list[int], sampling: Sampling, on_tokens=None):
    (generation,) = generate(
        target,
        drafter,
        [prompt],
        cfg.max_new_tokens,
        sampling,
        seed=cfg.seed,
        verification=cfg.verification,
        stop_strings=tuple(cfg.stop_strings),
        on_tokens=on_tokens,
    )
    return generation


def timed(
    cfg: DictConfig, target: TargetModel, drafters: dict[str, Drafter], prompt: list[int], sampling: Sampling
) -> dict[str, float]:
    """Tokens/s of each drafter: median of runs without streaming, the drafters taking turns."""
    rates: dict[str, list[float]] = {name: [] for name in drafters}
    for _ in range(TIMED_RUNS):
        for name, drafter in drafters.items():
            generation = run(cfg, target, drafter, prompt, sampling)
            rates[name].append(len(generation.tokens) / decode_s(generation))
    return {name: median(values) for name, values in rates.items()}


def report(console: Console, generation: Generation) -> None:
    drafted, accepted = sum(generation.drafted), sum(generation.accepted)
    parts = [f"{len(generation.tokens)} tokens ({generation.finish_reason})"]
    if generation.target_forwards:
        tau = (len(generation.tokens) - 1) / generation.target_forwards  # prefill draws the first token
        parts.append(f"tau {tau:.2f} in {generation.target_forwards} target forwards")
    if drafted:
        parts.append(f"[green]{accepted}[/green] of {drafted} drafted tokens accepted")
    console.print(f"\n{', '.join(parts)}")


class StreamPrinter:
    """Prints tokens as they come, coloured by source; holds a character back until all its bytes are there."""

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase) -> None:
        self.console, self.tokenizer = console, tokenizer
        self.pending: list[int] = []  # tokens whose text is not complete
        self.before: list[int] = []  # the last printed tokens, for tokenizers whose text depends on neighbours

    def __call__(self, prompt_index: int, tokens: list[int], sources: list[int]) -> None:
        for token, source in zip(tokens, sources, strict=True):
            self.pending.append(token)
            known = self.tokenizer.decode(self.before)
            text = self.tokenizer.decode(self.before + self.pending)[len(known) :]
            if text.endswith("\ufffd") and len(self.pending) < 8:
                continue
            self.console.print(Text(text, style=COLOURS.get(Source(source), "")), end="")
            self.before, self.pending = (self.before + self.pending)[-4:], []


if __name__ == "__main__":
    command("generate")(main)()
