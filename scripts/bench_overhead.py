"""Measure where a step's time goes: milliseconds per step by stage, and the share outside the target's forward.

    python scripts/bench_overhead.py pystdlib-8l prompts.jsonl [--max-nodes 16 --methods pld anpd logitspec]
    python scripts/bench_overhead.py random-100m prompts.jsonl --tokenizer pystdlib-8l

`random-100m` is a Llama of 12 layers, width 768 and 114 M parameters with random weights. Its texts mean nothing, but
its forwards cost as much as those of a trained model. Prompts are read as by `spectrain.bench`. Decoding is at batch 1,
greedy, and sampled at T=0.8, with top-k 50 and with top-p 0.9. Methods take turns, and the first prompt is the warm-up.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from spectrain.decoding import Generation, Sampling, TargetModel, generate, load_target
from spectrain.decoding.generation import STAGES
from spectrain.measure.statistics import time_share
from spectrain.measure.tau import counts_of, tau_estimate
from spectrain.methods.registry import build_method, method_config
from spectrain.stores.locations import bundled_folder
from spectrain.stores.prompts import conversation_ids, read_prompts

SAMPLINGS = {
    "greedy": Sampling(),
    "T=0.8": Sampling(temperature=0.8),
    "T=0.8, top-k 50": Sampling(temperature=0.8, top_k=50),
    "T=0.8, top-p 0.9": Sampling(temperature=0.8, top_p=0.9),
}
RANDOM = "random-100m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help=f"folder, Hugging Face id, bundled name, or {RANDOM}")
    parser.add_argument("prompts", type=Path, help=".jsonl")
    parser.add_argument("--tokenizer", default="pystdlib-8l", help=f"target whose tokenizer {RANDOM} takes")
    parser.add_argument("--methods", nargs="+", default=["pld", "anpd", "logitspec", "lookahead", "spectra_core"])
    parser.add_argument("--max-nodes", type=int, help="nodes of a step, for every method; default: each method's own")
    parser.add_argument("--limit", type=int, default=8, help="prompts measured")
    parser.add_argument("--new", type=int, default=80, help="new tokens, a prompt")
    options = parser.parse_args()
    target = open_target(options.target, options.tokenizer)
    drafters = {n: build_method(method_config(n, options.max_nodes), target, {}) for n in options.methods}
    questions = read_prompts(options.prompts, options.limit + 1)
    prompts = [conversation_ids(target.tokenizer, q.turns[:1], []) for q in questions]
    found: dict[tuple[str, str], list[Generation]] = {}
    for number, prompt in enumerate(track(prompts, "prompts")):
        for setting, sampling in SAMPLINGS.items():
            for name, drafter in drafters.items():
                generations = generate(target, drafter, [prompt], options.new, sampling, prompt_numbers=[number])
                if number > 0:
                    found.setdefault((setting, name), []).extend(generations)
    Console(width=max(110, Console().width)).print(table_of(found))  # a pipe has 80 columns


def open_target(name: str, tokenizer: str) -> TargetModel:
    if name != RANDOM:
        return load_target(bundled_folder(name) or name, device="cpu")
    words = load_target(bundled_folder(tokenizer) or tokenizer, device="cpu").tokenizer
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        attn_implementation="sdpa",
        tie_word_embeddings=True,
    )
    return TargetModel(LlamaForCausalLM(config).eval().requires_grad_(False), words)


def table_of(found: dict[tuple[str, str], list[Generation]]) -> Table:
    table = Table(title="ms a step, and the share of time outside the target's forward")
    for head in ("sampling", "method", "tau", *STAGES, "outside"):
        table.add_column(head, no_wrap=True)
    for (setting, name), generations in found.items():
        steps = sum(g.target_forwards for g in generations)
        stages = (f"{1000 * sum(g.time_s[stage] for g in generations) / steps:.2f}" for stage in STAGES)
        outside = 1 - time_share([g.time_s for g in generations])["forward"]
        table.add_row(setting, name, f"{tau_estimate(counts_of(generations)).value:.2f}", *stages, f"{outside:.1%}")
    return table


if __name__ == "__main__":
    main()
