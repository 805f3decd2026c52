"""What a benchmark compares: our methods, and Hugging Face's own generation as peers, behind one call.

A peer runs on the same model, prompts and sampling. It reports tokens, target forwards, time, and how many tokens each
step drafted and accepted; what else happens inside its steps is not visible.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from spectrain.decoding import Drafter, Generation, Sampling, TargetModel, generate
from spectrain.decoding.errors import UserError
from spectrain.decoding.generation import STAGES
from spectrain.decoding.tree import Source

PEERS = ("hf_generate", "hf_prompt_lookup", "hf_assisted")


@dataclass(frozen=True)
class Work:
    """How every contender decodes.

    Args:
        max_new_tokens: most tokens of a reply.
        sampling: the same for all.
        batch_size: rows decoded together.
        seed: prompts draw from generators seeded by it and by their own number.
        verification: "token" or "block", for drafts drawn from a q.
        stop_token_ids: end a reply; None: the target's EOS ids, (): nothing does.
    """

    max_new_tokens: int
    sampling: Sampling
    batch_size: int = 1
    seed: int = 0
    verification: str = "token"
    stop_token_ids: tuple[int, ...] | None = None


class Assisted(Protocol):
    """What assisted generation needs of the method `speculative`."""

    draft_model: TargetModel
    gamma: int


class Contender(ABC):
    """Something that continues prompts. `kind` is "method" or "peer"."""

    kind: str
    looks_up = False  # drafts from a table or store

    @abstractmethod
    def decode(self, prompts: Sequence[list[int]], numbers: Sequence[int], work: Work) -> list[Generation]:
        """Continues token-id prompts; `numbers` seed their samples."""


class Method(Contender):
    """A drafter in our loop."""

    kind = "method"

    def __init__(self, target: TargetModel, drafter: Drafter):
        self.target, self.drafter = target, drafter
        self.looks_up = drafter.looks_up

    def decode(self, prompts: Sequence[list[int]], numbers: Sequence[int], work: Work) -> list[Generation]:
        return generate(
            self.target,
            self.drafter,
            prompts,
            work.max_new_tokens,
            work.sampling,
            seed=work.seed,
            prompt_numbers=numbers,
            batch_size=work.batch_size,
            verification=work.verification,
            stop_token_ids=work.stop_token_ids,
        )


class HuggingFace(Contender):
    """transformers' `generate`, one prompt at a time.

    Args:
        target: the model.
        options: of its GenerationConfig, beside length and sampling: those of prompt lookup.
        assistant: the draft model of assisted generation.
    """

    kind = "peer"

    def __init__(self, target: TargetModel, options: dict | None = None, assistant: TargetModel | None = None):
        self.target, self.options, self.assistant = target, options or {}, assistant
        self.drafts = bool(self.options) or assistant is not None

    def decode(self, prompts: Sequence[list[int]], numbers: Sequence[int], work: Work) -> list[Generation]:
        if work.batch_size != 1:
            raise UserError(f"peers decode one prompt at a time, not batch_size={work.batch_size}; give batch_size=1")
        return [self._one(prompt, number, work) for prompt, number in zip(prompts, numbers, strict=True)]

    def _one(self, prompt: list[int], number: int, work: Work) -> Generation:
        model = self.target.model
        eos_ids = list(self.target.eos_ids if work.stop_token_ids is None else work.stop_token_ids)
        config = GenerationConfig(
            max_new_tokens=work.max_new_tokens,
            eos_token_id=eos_ids or None,
            pad_token_id=eos_ids[0] if eos_ids else 0,
            **_sampling_options(work.sampling),
            **self.options,
        )
        tokens = torch.tensor([prompt], device=self.target.device)
        inputs = {"attention_mask": torch.ones_like(tokens), "generation_config": config}
        if self.assistant is not None:
            inputs["assistant_model"] = self.assistant.model
        fed, emitted = [], _Emitted()  # tokens of each forward, and after each

        def note(module: PreTrainedModel, args: tuple, kwargs: dict) -> None:
            fed.append(kwargs["input_ids"].shape[1])

        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        devices = [self.target.device] if self.target.device.type == "cuda" else []
        began = time.perf_counter()
        try:
            with torch.random.fork_rng(devices=devices), torch.inference_mode(), _plain_defaults(model):
                torch.manual_seed(work.seed * 1_000_003 + number)
                output = model.generate(tokens, streamer=emitted, **inputs)
            new = output[0, len(prompt) :].tolist()
        finally:
            handle.remove()
        elapsed_s = time.perf_counter() - began
        return Generation(
            tokens=new,
            finish_reason="eos" if new and new[-1] in eos_ids else "length",
            # The first forward reads the prompt. With a draft it verifies one as well, so it is a step like any other.
            target_forwards=len(fed) if self.drafts else len(fed) - 1,
            accepted=[count - 1 for count in emitted.counts[1:]] if self.drafts else [],
            drafted=[fed[0] - len(prompt), *(count - 1 for count in fed[1:])] if self.drafts else [],
            drafted_by_source=[0] * len(Source),
            steps_by_depth=[],
            retrieval_hits=0,
            sources=[],
            elapsed_s=elapsed_s,
            prefill_s=elapsed_s,  # not told apart from the rest
            time_s=dict.fromkeys(STAGES, 0.0),
        )


class _Emitted(BaseStreamer):
    """Counts what `generate` puts out: the prompt, then the tokens of each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


def build_peer(name: str, target: TargetModel, lookup: Mapping, speculative: Assisted | None) -> HuggingFace:
    """A peer by name.

    Args:
        name: one of PEERS.
        target: the model.
        lookup: `max_ngram` and `draft_tokens` of our `pld`, which prompt lookup is given too.
        speculative: the method whose draft model and gamma assisted generation is given too.

    Raises:
        UserError: there is no such peer.
    """
    if name == "hf_generate":
        return HuggingFace(target)
    if name == "hf_prompt_lookup":
        options = {
            "prompt_lookup_num_tokens": lookup["draft_tokens"],
            "max_matching_ngram_size": lookup["max_ngram"],
        }
        return HuggingFace(target, options)
    if name == "hf_assisted":
        return HuggingFace(target, {}, _with_constant_length(speculative.draft_model, speculative.gamma))
    raise UserError(f"peers={name} is unknown; choose among {', '.join(PEERS)}")


def _with_constant_length(assistant: TargetModel, gamma: int) -> TargetModel:
    """Assisted generation reads its draft length from the assistant's own generation config."""
    model = copy.copy(assistant.model)
    model.generation_config = GenerationConfig(
        num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return TargetModel(model, assistant.tokenizer)


@contextmanager
def _plain_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Keeps a model's own generation defaults (a repetition penalty, say) out of a comparison.

    Silences transformers meanwhile: assisted generation warns of how it calls itself.
    """
    before, model.generation_config = model.generation_config, GenerationConfig()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        model.generation_config = before


def _sampling_options(sampling: Sampling) -> dict:
    if sampling.greedy:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }
