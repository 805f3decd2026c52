"""Compare the cost of a SPIRe training step with an ordinary distillation step, and its memory by row length.

    python scripts/bench_training.py --target checkpoints/pystdlib-8l

Both steps train two blocks pruned from the target, at equal batch and length, with the same loss and optimizer. The
ordinary step is that of a Hugging Face Llama with full causal attention, with one forward over the row. Steps take
turns. Ratios compare two neighbouring steps and are medians with a 95 % bootstrap interval. Peak memory is measured in
one process per length (resident set beyond that before the first step).

    python scripts/bench_training.py --target smollm2 --chats 20000

How fast ShareGPT rows become tokens beside the tokenizer's own `apply_chat_template`, in turns, and what making rows of
a file of them takes.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from spectrain.config.commands import Corpus
from spectrain.decoding import TargetModel, load_target
from spectrain.decoding.lean import shape_of
from spectrain.measure.statistics import median
from spectrain.models.pruned_init import last_layers, new_drafter
from spectrain.models.rollout import rollout
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.stores import row_cache
from spectrain.stores.chat_tokens import ChatRenderer
from spectrain.stores.locations import bundled_folder
from spectrain.stores.row_cache import corpus_rows
from spectrain.stores.texts import read_documents
from spectrain.training.losses import LossSettings, Teacher, drafter_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pystdlib-8l", help="folder, hub id or bundled name of a Llama-like model")
    parser.add_argument("--batch", type=int, default=4, help="rows")
    parser.add_argument("--length", type=int, default=1024, help="tokens a row")
    parser.add_argument("--k", type=int, default=4, help="rollout depth")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of steps timed")
    parser.add_argument("--chats", type=int, default=0, help="conversations of a file that is made on the fly")
    parser.add_argument("--memory-of", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    target = load_target(bundled_folder(args.target) or args.target)
    if args.chats:
        report_chats(target, args.chats)
        return
    config = SpireConfig(shape_of(target.model), last_layers(target.model, 2), k=args.k)
    target = target.with_capture(config.target_layers)
    drafter = new_drafter(target, config, "pruned")
    if args.memory_of:
        print(peak_bytes(target, drafter, args.batch, args.memory_of))
        return
    shape = f"batch {args.batch} x {args.length}, k={args.k}"
    print(f"{args.target}, {shape}, bf16 autocast, {torch.get_num_threads()} threads")
    report_times(args, target, drafter)
    report_memory(args)


def report_times(args: argparse.Namespace, target: TargetModel, drafter: SpireDrafter) -> None:
    plain = pruned_llama(target, drafter)
    parts = {
        "rollout": step_of(drafter, drafter.lm_head.weight, lambda t, f: rollout(drafter, t, f.captured), target),
        "ordinary": step_of(plain, plain.lm_head.weight, lambda t, f: plain.model(t, use_cache=False)[0], target),
    }
    seconds = {name: {"target": [], "drafter": []} for name in parts}
    for pair in range(args.pairs + 2):
        tokens = torch.randint(0, target.vocab_size, (args.batch, args.length))
        for name, step in parts.items():
            target_s, drafter_s = step(tokens)
            if pair >= 2:  # warm-up
                seconds[name]["target"].append(target_s)
                seconds[name]["drafter"].append(drafter_s)
    for name, times in seconds.items():
        whole = np.add(times["target"], times["drafter"])
        print(
            f"{name:9} step {np.median(whole):.3f} s: target {np.median(times['target']):.3f}, "
            f"drafter {np.median(times['drafter']):.3f}; {args.batch * args.length / np.median(whole):.0f} tokens/s"
        )
    whole = [np.add(seconds[name]["target"], seconds[name]["drafter"]) for name in parts]
    print(f"ratio of whole steps   {median(whole[0] / whole[1])}")
    drafters = [np.array(seconds[name]["drafter"]) for name in parts]
    print(f"ratio without target   {median(drafters[0] / drafters[1])}")


def pruned_llama(target: TargetModel, drafter: SpireDrafter) -> LlamaForCausalLM:
    """The drafter's blocks as an ordinary Hugging Face model."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = drafter.config.n_layer
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.load_state_dict(drafter.embed_tokens.state_dict())
    for layer, index in zip(model.model.layers, drafter.config.target_layers, strict=True):
        layer.load_state_dict(target.model.model.layers[index].state_dict())
    return model.float().train()


def step_of(
    model: torch.nn.Module, unembedding: Tensor, hidden_of: Callable, target: TargetModel
) -> Callable[[Tensor], tuple[float, float]]:
    """A training step that returns the seconds of the target's forward and of the rest."""
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: Tensor) -> tuple[float, float]:
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                features = target.features(tokens)
            middle = time.perf_counter()
            hidden = hidden_of(tokens, features)
            teacher = Teacher(features.final_hidden.flatten(0, 1), target.unembedding)
            parts = drafter_loss(LossSettings(), hidden.flatten(0, 1), unembedding, teacher, tokens.flatten())
        parts.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return middle - start, time.perf_counter() - middle

    return step


def report_memory(args: argparse.Namespace) -> None:
    peaks = {}
    for length in (args.length // 2, args.length, 2 * args.length):
        command = [sys.executable, __file__, "--target", args.target, "--batch", str(args.batch), "--k", str(args.k)]
        out = subprocess.run([*command, "--memory-of", str(length)], check=True, capture_output=True, text=True)
        peaks[length] = int(out.stdout.split()[-1])
    first = next(iter(peaks))
    for length, peak in peaks.items():
        print(f"peak memory at {length:5} tokens a row: {peak / 2**20:6.0f} MiB, {peak / peaks[first]:.2f}x")


def peak_bytes(target: TargetModel, drafter: SpireDrafter, batch: int, length: int) -> int:
    """Resident bytes that training steps add to what the process held before (Linux: the peak is counted anew)."""
    step = step_of(drafter, drafter.lm_head.weight, lambda t, f: rollout(drafter, t, f.captured), target)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak_bytes()
    for _ in range(2):
        step(torch.randint(0, target.vocab_size, (batch, length)))
    return resident_peak_bytes() - before


def report_chats(target: TargetModel, n_chats: int) -> None:
    draw, words = random.Random(0), [word for one in islice(read_documents(None), 200) for word in one.text.split()]
    with tempfile.TemporaryDirectory() as folder:
        file, row_cache.ROWS = Path(folder, "chats.jsonl"), Path(folder, "rows")
        with file.open("w") as lines:
            for _ in range(n_chats):
                sizes = [draw.randint(*range_) for _ in range(draw.randint(1, 4)) for range_ in ((5, 60), (20, 300))]
                texts = [" ".join(draw.choices(words, k=size)) for size in sizes]
                turns = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]
                lines.write(json.dumps({"conversations": turns}) + "\n")
        chats = [one.chat for one in islice(read_documents(str(file)), 4096)]
        renderer, seconds = ChatRenderer(target.tokenizer, target.eos_ids), ([], [])
        for i in [*range(0, len(chats), 256)] * 3:
            group, start = chats[i : i + 256], time.perf_counter()
            renderer.tokens(group)
            middle = time.perf_counter()
            target.tokenizer.apply_chat_template([chat.messages for chat in group])
            seconds[0].append(middle - start)
            seconds[1].append(time.perf_counter() - middle)
        speed = median(np.array(seconds[1]) / np.array(seconds[0]))
        print(f"speed over apply_chat_template {speed}; {256 / np.median(seconds[0]):.0f} conversations/s")
        for limit in (200, None):
            Path("/proc/self/clear_refs").write_text("5")
            before, start = resident_peak_bytes(), time.perf_counter()
            rows = corpus_rows(Corpus(str(file), max_documents=limit), target, 1024)
            took, more = time.perf_counter() - start, (resident_peak_bytes() - before) / 2**20
            print(f"max_documents={limit}: {len(rows.train)} rows of 1024, {took:.1f} s, {more:.0f} MiB more")


def resident_peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


if __name__ == "__main__":
    main()
