"""The generation of Hugging Face, as a baseline beside our methods on the same model and prompts.

A baseline reports tokens, target forwards, time, and how many tokens each step drafted and accepted. What else happens
inside its steps is not visible.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from logging import getLogger
from types import SimpleNamespace

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from spectrain.decoding import Generation, Sampling
from spectrain.decoding.generation import Choice
from spectrain.methods.pld import PromptLookup
from spectrain.methods.speculative import Speculative
from spectrain.target import TargetModel, text_dtype
from spectrain.target.loading import first_line
from spectrain.target.weights import to_dtype

BASELINES = ("hf_generate", "hf_prompt_lookup", "hf_assisted")
# With a static cache transformers compiles the forward of a single token: `generate(cache_implementation="static")`.
EAGER, COMPILED = "eager, dynamic cache", "compiled, static cache"

log = getLogger(__name__)


def build_baseline(
    name: str,
    target: TargetModel,
    lookup: PromptLookup | None = None,
    speculative: Speculative | None = None,
    model: PreTrainedModel | None = None,
) -> Callable[..., list[Generation]]:
    """Build one of BASELINES, to be called with prompts and max_new_tokens as `generate` is.

    Prompt lookup takes the draft length and longest n-gram of our `lookup`, assisted generation the draft model and
    gamma of our `speculative`. `model` is the target's, as `own_model` returns it; several baselines can share one.
    """
    model = model or own_model(target)
    options, assistant = {}, None
    if name == "hf_generate" and target.device.type == "cuda":
        ways = {EAGER: {}, COMPILED: {"cache_implementation": "static"}}
        generate = partial(generate_with_transformers, target, model)
        return partial(fastest_of, {way: partial(generate, options=options) for way, options in ways.items()})
    if name == "hf_prompt_lookup":
        draft_tokens = min(lookup.draft_tokens, lookup.max_nodes - 1)
        options = {"prompt_lookup_num_tokens": draft_tokens, "max_matching_ngram_size": lookup.max_ngram}
    elif name == "hf_assisted":
        assistant = own_model(speculative.draft_model)
        # Assisted generation reads its draft length from the assistant's own generation config.
        assistant.generation_config = GenerationConfig(
            num_assistant_tokens=speculative.gamma,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
    return partial(generate_with_transformers, target, model, options=options, assistant=assistant)


def fastest_of(
    ways: dict[str, Callable[..., list[Generation]]],
    prompts: Sequence[list[int]],
    *arguments: object,
    **options: object,
) -> list[Generation]:
    """Continue prompts in several ways. For each prompt the fastest one counts, and its `choices` name the way.

    A way that fails, because it cannot run this model or nothing can be compiled here, is left out from then on.
    """
    found = {}
    for way, decode in dict(ways).items():
        try:
            found[way] = decode(prompts, *arguments, **options)
        except Exception as error:
            if len(ways) == 1:
                raise
            log.warning("hf_generate is not measured %s: %s", way, first_line(error))
            del ways[way]
    fastest = []
    for of_prompt in zip(*found.values(), strict=True):
        way, generation = min(zip(found, of_prompt, strict=True), key=lambda pair: pair[1].elapsed_s)
        generation.choices = [Choice(way, "fastest", None, max(1, generation.target_forwards))]
        fastest.append(generation)
    return fastest


def own_model(target: TargetModel) -> PreTrainedModel:
    """Return the Hugging Face model of a target, with weights in the dtype that the user asked for."""
    model = target.model
    if model.dtype == text_dtype(target):
        return copy.copy(model)
    model = copy.deepcopy(model)
    to_dtype(list(model.parameters()), text_dtype(target))
    return model


def generate_with_transformers(
    target: TargetModel,
    model: PreTrainedModel,
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

    `model` is the target's, as `own_model` returns it. `options` are more of its GenerationConfig, `assistant` the
    draft model of assisted generation.
    """
    sampling, options = sampling or Sampling(), dict(options or {})
    drafts = "prompt_lookup_num_tokens" in options or assistant is not None
    eos_ids = list(target.eos_ids if stop_token_ids is None else stop_token_ids)
    if not sampling.greedy:  # Hugging Face draws its own numbers, whatever `draws` says
        options |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        options |= {"min_p": sampling.min_p or None}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_ids or None,
        pad_token_id=eos_ids[0] if eos_ids else 0,
        do_sample=not sampling.greedy,
        **options,
    )
    inputs = {"generation_config": config} | ({} if assistant is None else {"assistant_model": assistant})
    numbers = range(len(prompts)) if prompt_numbers is None else prompt_numbers
    return [
        _continue(model, prompt, seed * 1_000_003 + number, inputs, drafts)
        for prompt, number in zip(prompts, numbers, strict=True)
    ]


def _continue(model: PreTrainedModel, prompt: list[int], seed: int, inputs: Mapping, drafts: bool) -> Generation:
    tokens, eos_ids = torch.tensor([prompt], device=model.device), inputs["generation_config"].eos_token_id or []
    emitted: list[int] = []  # what is put out: the prompt, then the tokens of each step
    if drafts:
        inputs = {**inputs, "streamer": SimpleNamespace(put=lambda one: emitted.append(one.numel()), end=lambda: None)}
    devices = [model.device] if model.device.type == "cuda" else []
    began = time.perf_counter()
    with torch.random.fork_rng(devices=devices), _observed(model, drafts) as fed:
        torch.manual_seed(seed)
        output = model.generate(tokens, attention_mask=torch.ones_like(tokens), **inputs)
        new = output[0, len(prompt) :].tolist()
    elapsed_s = time.perf_counter() - began
    return Generation(
        tokens=new,
        finish_reason="eos" if new and new[-1] in eos_ids else "length",
        # The first forward reads the prompt. With a draft it verifies one as well, so it is a step like any other.
        target_forwards=len(fed) if drafts else len(new) - 1,
        accepted=[count - 1 for count in emitted[1:]] if drafts else [],
        drafted=[fed[0] - len(prompt), *(count - 1 for count in fed[1:])] if drafts else [],
        elapsed_s=elapsed_s,
        prefill_s=elapsed_s,  # cannot be separated from the rest
    )


@contextmanager
def _observed(model: PreTrainedModel, forwards: bool) -> Iterator[list[int]]:
    """Yield a list that gets the number of tokens of each forward, if these are asked for.

    They are not where transformers compiles the forward, which a hook would split.
    Meanwhile the model's own generation defaults (a repetition penalty, say) stay out of the comparison, and
    transformers is silent: assisted generation warns about how it calls itself.
    """
    fed: list[int] = []

    def note(module: PreTrainedModel, args: tuple, kwargs: dict) -> None:
        fed.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True) if forwards else None
    before, model.generation_config = model.generation_config, GenerationConfig()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield fed
    finally:
        if hook is not None:
            hook.remove()
        logging.set_verbosity(verbosity)
        model.generation_config = before
