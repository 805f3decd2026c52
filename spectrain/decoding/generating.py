"""Continue a list of prompts by an engine of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from spectrain.decoding.drafter import Drafter
from spectrain.decoding.engine import CACHE_BLOCK, Engine, Request, check_prompt
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import Emitted
from spectrain.decoding.sampling import Sampling
from spectrain.errors import UserError, check_whole
from spectrain.target.target import TargetModel


@torch.inference_mode()
def generate(
    target: TargetModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    **options,
) -> list[Generation]:
    """Continue each prompt. Arguments and errors are those of `stream`; the generations are in the prompts' order."""
    steps = stream(target, drafter, prompts, max_new_tokens, sampling, **options)
    ended = {step.request: step.generation for step in steps if step.generation is not None}
    return [ended[index] for index in range(len(prompts))]


def stream(
    target: TargetModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    seed: int = 0,
    prompt_numbers: Sequence[int] | None = None,
    max_length: int | None = None,
    batch_size: int = 1,
    stop_token_ids: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    verification: str = "block",
    cache_block_tokens: int = CACHE_BLOCK,
) -> Iterator[Emitted]:
    """Continue each prompt, and yield its tokens as they are accepted.

    The text follows the target's own distribution, whatever the drafter guesses.

    Args:
        target: the model whose text this is.
        drafter: the method.
        prompts: token ids; prompt i is request i of what is yielded.
        max_new_tokens: maximum length of a continuation.
        sampling: how tokens are chosen; None: greedy.
        seed: prompt i draws from a generator seeded by (seed, i), so its sample is the same in any batch, unless how
            many tokens are drawn from a draft model depends on the batch (max_nodes=auto). With `draws=shared` it is
            the same with any drafter.
        prompt_numbers: the numbers i; None: 0, 1, ...
        max_length: maximum length of a prompt and its continuation; None: max_new_tokens is the only limit.
        batch_size: rows decoded together.
        stop_token_ids: tokens that end a text; None: the target's EOS ids, (): none.
        stop: a text ends with the token that completes one of these strings; needs the target's tokenizer.
        verification: "block" or "token": how drafts that were drawn from a q are verified; see `verify`.
        cache_block_tokens: the slots of a row in the caches are a multiple of this.

    Yields:
        For each row after each step, the tokens that it gained.

    Raises:
        UserError: a prompt is empty, too long for the target, or holds tokens outside its vocabulary; or the batch
            does not fit in memory.
    """
    check_whole("max_new_tokens", max_new_tokens, 1)
    check_whole("batch_size", batch_size, 1)
    most = [check_prompt(target, prompt, max_new_tokens, f"prompt {i}", max_length) for i, prompt in enumerate(prompts)]
    if not prompts:
        return
    sampling = (sampling or Sampling()).drawn_by(drafter.method.draws)
    longest = max(len(prompt) + new for prompt, new in zip(prompts, most, strict=True))
    options = {"stop_token_ids": stop_token_ids, "verification": verification, "draws": sampling.draws}
    options |= {"reads_in_pieces": False, "cache_block_tokens": cache_block_tokens, "max_length": longest}
    engine = Engine(target, drafter, min(batch_size, len(prompts)), **options)
    for number, prompt, new in zip(prompt_numbers or range(len(prompts)), prompts, most, strict=True):
        engine.submit(Request(prompt, new, sampling, seed, number, tuple(stop)))
    try:
        while engine.has_work:
            for emitted in engine.step(rehearses=True):
                if emitted.error is not None:
                    raise UserError(emitted.error)
                yield emitted
    finally:
        engine.close()
