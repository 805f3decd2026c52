"""Text in, text out: what `method.generate(...)` and `method.stream(...)` do for one prompt.

target = load_target("pystdlib-8l")
method = load_method("pld", target)
reply = method.generate("def read_config(path):", max_new_tokens=64)
for piece in method.stream([{"role": "user", "content": "Hello"}], temperature=0.8):
    print(piece, end="")
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from spectrain.decoding.drafter import Drafter
from spectrain.decoding.errors import UserError
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import generate
from spectrain.decoding.sampling import Sampling

CONTEXT_TOKENS = 4  # tokens before a piece that are decoded with it: the text of some tokens depends on neighbours
LONGEST_CHARACTER = 8  # tokens after which bytes that give no character are printed as they are

Prompt = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Reply:
    """A continuation as text, and how it came about."""

    text: str
    generation: Generation

    @property
    def drafted(self) -> int:
        """Tokens that the method proposed."""
        return sum(self.generation.drafted)

    @property
    def accepted(self) -> int:
        """Proposed tokens that the target accepted and that stand in the text."""
        return sum(self.generation.accepted)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens produced per target forward pass (tau); plain decoding has 1. None: no forward after the prompt's."""
        forwards = self.generation.target_forwards
        return (self.accepted + forwards) / forwards if forwards else None

    def __str__(self) -> str:
        return self.text


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a text, or of messages by the tokenizer's chat template, ready for the answer.

    Raises:
        UserError: the tokenizer has no chat template, or its template refuses the messages.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise UserError("the target's tokenizer has no chat template; give the prompt as one text")
    try:
        ids = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)["input_ids"]
    except Exception as error:  # jinja and templates each raise their own types here
        raise UserError(f"the chat template cannot render these messages ({error}); give role and content") from error
    return list(ids)


def generate_text(
    drafter: Drafter,
    prompt: Prompt,
    max_new_tokens: int = 128,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    verification: str = "token",
    on_tokens=None,
) -> Reply:
    """Continue one prompt. The text follows the target's own distribution, whatever the method proposes.

    Args:
        drafter: of `load_method`.
        prompt: a text, or messages ({"role": ..., "content": ...}) for the chat template.
        max_new_tokens: most tokens of the continuation.
        temperature: 0 is greedy.
        top_k: keeps the k most probable tokens; 0: all.
        top_p: keeps the most probable tokens up to this total probability.
        min_p: keeps tokens of at least this share of the highest probability.
        seed: of the random draws.
        stop: texts that end the continuation.
        verification: "token" or "block", for drafts that were drawn.
        on_tokens: see `loop.generate`.

    Raises:
        UserError: the prompt is empty or too long, or an option is out of range.
    """
    target = drafter.target
    if target is None or target.tokenizer is None:
        raise UserError("this method has no target with a tokenizer; make it by load_method(name, load_target(...))")
    (generation,) = generate(
        target,
        drafter,
        [prompt_ids(target.tokenizer, prompt)],
        max_new_tokens,
        Sampling(temperature, top_k, top_p, min_p),
        seed=seed,
        stop_strings=tuple(stop),
        verification=verification,
        on_tokens=on_tokens,
    )
    return Reply(target.tokenizer.decode(generation.tokens, skip_special_tokens=True), generation)


class Pieces:
    """Turns tokens into printable pieces of text: a character is held back until all its bytes are there."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.pending: list[int] = []  # tokens whose text is not complete
        self.before: list[int] = []  # the last tokens that were given out

    def add(self, token: int) -> str:
        """The text that can be printed now; empty while a character is incomplete."""
        self.pending.append(token)
        known = self.tokenizer.decode(self.before)
        text = self.tokenizer.decode(self.before + self.pending)[len(known) :]
        if text.endswith("\ufffd") and len(self.pending) < LONGEST_CHARACTER:
            return ""
        self.before, self.pending = (self.before + self.pending)[-CONTEXT_TOKENS:], []
        return text


def stream_text(drafter: Drafter, prompt: Prompt, max_new_tokens: int = 128, **options) -> Iterator[str]:
    """Continue one prompt and yield its text piece by piece, as the target accepts tokens.

    Arguments as in `generate_text`. The decoding runs in a thread of its own; it ends with the iteration.

    Raises:
        UserError: see `generate_text`; raised by the first `next`.
    """
    results: queue.Queue = queue.Queue()
    left = threading.Event()

    def on_tokens(index: int, tokens: list[int], sources: list[int]) -> None:
        if left.is_set():
            raise _Left
        results.put(tokens)

    def work() -> None:
        try:
            generate_text(drafter, prompt, max_new_tokens, on_tokens=on_tokens, **options)
            results.put(None)
        except _Left:
            pass
        except BaseException as error:
            results.put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        pieces = None
        while (result := results.get()) is not None:
            if isinstance(result, BaseException):
                raise result
            pieces = pieces or Pieces(drafter.target.tokenizer)
            special = drafter.target.eos_ids
            yield from filter(None, (pieces.add(token) for token in result if token not in special))
    finally:
        left.set()
        thread.join()


class _Left(Exception):
    """Nobody reads the stream any more."""
