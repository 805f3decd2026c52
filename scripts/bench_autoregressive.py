"""Compare the autoregressive loop with Hugging Face `generate`: greedy, batch 1, float32, the same model and prompts.

    python scripts/bench_autoregressive.py pystdlib-8l [--prompts 12 --new 96 --threads 2]

The two take turns, prompt by prompt and in alternating order, so a drifting machine affects both alike. The output is
the median over prompts of the ratio of their rates, with its 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import GenerationConfig, PreTrainedModel

from spectrain.decoding import TargetModel, generate, load_target
from spectrain.measure.baselines import own_model
from spectrain.measure.statistics import median
from spectrain.methods.autoregressive import Autoregressive
from spectrain.stores.locations import bundled_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder, Hugging Face id or bundled name")
    parser.add_argument("--prompts", type=int, default=12, help="timed prompts; two more warm up")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new", type=int, default=96, help="new tokens of each prompt; EOS is ignored")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_target(bundled_folder(options.target) or options.target, device="cpu")
    theirs = own_model(target)
    generator = torch.Generator().manual_seed(0)
    shape = (options.prompts + 2, options.prompt_tokens)
    prompts = torch.randint(target.vocab_size, shape, generator=generator).tolist()

    ratios, rates = [], []
    for index, prompt in enumerate(prompts):
        runs = [(loop_s, target), (hugging_face_s, theirs)]
        seconds = {run: run(model, [prompt], options.new) for run, model in (runs if index % 2 else reversed(runs))}
        if index >= 2:
            ratios.append(seconds[hugging_face_s] / seconds[loop_s])
            rates.append((options.new / seconds[loop_s], options.new / seconds[hugging_face_s]))
    ratio = median(ratios)
    ours, others = (statistics.median(column) for column in zip(*rates, strict=True))
    print(
        f"{options.target}: {options.prompts} random prompts of {options.prompt_tokens} tokens, {options.new} new, "
        f"float32, greedy, batch 1, {options.threads} threads\n"
        f"loop {ours:.1f} tokens/s, Hugging Face generate {others:.1f} tokens/s (medians); "
        f"ratio {ratio}"
    )


def loop_s(target: TargetModel, prompts: list[list[int]], n_new: int) -> float:
    started = time.perf_counter()
    generation = generate(target, Autoregressive(), prompts, n_new, stop_token_ids=())[0]
    elapsed_s = time.perf_counter() - started
    assert len(generation.tokens) == n_new
    return elapsed_s


def hugging_face_s(model: PreTrainedModel, prompts: list[list[int]], n_new: int, **options: str) -> float:
    """Time the continuation of prompts of one length; `options` go to the GenerationConfig."""
    never = model.config.vocab_size  # an EOS that no text holds; None would be replaced by the model's own
    config = GenerationConfig(do_sample=False, max_new_tokens=n_new, eos_token_id=never, pad_token_id=0, **options)
    tokens = torch.tensor(prompts, device=model.device)
    started = time.perf_counter()
    with torch.inference_mode(not options):  # compiled, with a static cache, transformers runs under its own no_grad
        output = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    texts = output.tolist()  # waits for a GPU
    elapsed_s = time.perf_counter() - started
    assert all(len(text) == len(prompts[0]) + n_new for text in texts), output.shape
    return elapsed_s


if __name__ == "__main__":
    main()
