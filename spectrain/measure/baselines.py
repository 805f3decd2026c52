"""Hugging Face's own generation, as baselines beside our methods on the same model, prompts and sampling.

A baseline reports tokens, target forwards, time, and how many tokens each step drafted and accepted. What else happens
inside its steps is not visible.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from spectrain.decoding import Generation, Sampling, TargetModel
from spectrain.decoding.errors import UserError
from spectrain.methods.pld import PromptLookup
from spectrain.methods.speculative import Speculative

BASELINES = ("hf_generate", "hf_prompt_lookup", "hf_assisted")


def build_baseline(
    name: str, target: TargetModel, lookup: PromptLookup | None = None, speculative: Speculative | None = None
) -> Callable[..., list[Generation]]:
    """Build a baseline that is called with prompts and max_new_tokens as `generate` is.

    Prompt lookup takes the draft length and longest n-gram of our `lookup`, assisted generation the draft model and
    gamma of our `speculative`. Raises UserError where there is no such baseline.
    """
    if name == "hf_generate":
        return partial(generate_with_transformers, target)
    if name == "hf_prompt_lookup":
        draft_tokens = min(lookup.draft_tokens, lookup.max_nodes - 1)
        options = {"prompt_lookup_num_tokens": draft_tokens, "max_matching_ngram_size": lookup.max_ngram}
        return partial(generate_with_transformers, target, options=options)
    if name == "hf_assisted":
        assistant = copy.copy(speculative.draft_model.model)
        # Assisted generation reads its draft length from the assistant's own generation config.
        assistant.generation_config = GenerationConfig(
            num_assistant_tokens=speculative.gamma,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        return partial(generate_with_transformers, target, assistant=assistant)
    raise UserError(f"peers={name} is unknown; choose among {', '.join(BASELINES)}")


def generate_with_transformers(
    target: TargetModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    seed: int = 0,
    prompt_numbers: Sequence[int] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    options: Mapping | None = None,
    assistant: PreTrainedModel | None = None,
) -> list[Generation]:
    """Continue prompts one at a time by transformers' `generate`; arguments as of our own.

    `options` are those of its GenerationConfig for prompt lookup, `assistant` the draft model of assisted generation.
    """
    sampling = sampling or Sampling()
    warping = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    warping["min_p"] = sampling.min_p or None
    eos_ids = list(target.eos_ids if stop_token_ids is None else stop_token_ids)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_ids or None,
        pad_token_id=eos_ids[0] if eos_ids else 0,
        do_sample=not sampling.greedy,
        **({} if sampling.greedy else warping),
        **(options or {}),
    )
    inputs = {"generation_config": config} | ({} if assistant is None else {"assistant_model": assistant})
    drafts = bool(options) or assistant is not None
    numbers = range(len(prompts)) if prompt_numbers is None else prompt_numbers
    return [
        _continue(target, prompt, seed * 1_000_003 + number, eos_ids, inputs, drafts)
        for prompt, number in zip(prompts, numbers, strict=True)
    ]


def _continue(
    target: TargetModel, prompt: list[int], seed: int, eos_ids: list[int], inputs: Mapping, drafts: bool
) -> Generation:
    tokens = torch.tensor([prompt], device=target.device)
    fed, emitted = [], _Emitted()  # tokens of each forward, and after each

    def note(module: PreTrainedModel, args: tuple, kwargs: dict) -> None:
        fed.append(kwargs["input_ids"].shape[1])

    handle = target.model.register_forward_pre_hook(note, with_kwargs=True)
    devices = [target.device] if target.device.type == "cuda" else []
    began = time.perf_counter()
    try:
        with torch.random.fork_rng(devices=devices), torch.inference_mode(), _plain_defaults(target.model):
            torch.manual_seed(seed)
            output = target.model.generate(tokens, attention_mask=torch.ones_like(tokens), streamer=emitted, **inputs)
        new = output[0, len(prompt) :].tolist()
    finally:
        handle.remove()
    elapsed_s = time.perf_counter() - began
    return Generation(
        tokens=new,
        finish_reason="eos" if new and new[-1] in eos_ids else "length",
        # The first forward reads the prompt. With a draft it verifies one as well, so it is a step like any other.
        target_forwards=len(fed) if drafts else len(fed) - 1,
        accepted=[count - 1 for count in emitted.counts[1:]] if drafts else [],
        drafted=[fed[0] - len(prompt), *(count - 1 for count in fed[1:])] if drafts else [],
        elapsed_s=elapsed_s,
        prefill_s=elapsed_s,  # cannot be separated from the rest
    )


class _Emitted(BaseStreamer):
    """Counts what `generate` puts out: the prompt, then the tokens of each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


@contextmanager
def _plain_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Keep a model's own generation defaults (a repetition penalty, say) out of a comparison.

    Silences transformers meanwhile: assisted generation warns about how it calls itself.
    """
    before, model.generation_config = model.generation_config, GenerationConfig()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        model.generation_config = before
