"""Text in, text out: prompts as token ids, replies, and the pieces of a stream."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

from transformers import PreTrainedTokenizerBase

from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import TokenLogprobs
from spectrain.errors import UserError

CONTEXT_TOKENS = 4  # tokens before a piece that are decoded with it
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token for a byte, in tokenizers that have them for unknown characters only
CLEANED = re.compile("[ .?!,'ntmsver]*$")  # all characters in what `clean_up_tokenization_spaces` replaces

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]  # a text, messages, or token ids


@dataclass(frozen=True)
class Reply:
    """A continuation as text, and how it came about."""

    text: str  # without special tokens, and without the stop text that ended it
    generation: Generation
    logprobs: list[TokenLogprobs] | None = None  # of each token, where they were asked for

    @property
    def finish_reason(self) -> str:
        """Why it ended: eos, stop (a stop text), length (max_new_tokens), or cancelled."""
        return self.generation.finish_reason

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not read, because an earlier text began alike."""
        return self.generation.cached_tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of wall time behind the first token, which reading the prompt gives. None: only that."""
        seconds = self.generation.elapsed_s - self.generation.prefill_s
        return (len(self.generation.tokens) - 1) / seconds if len(self.generation.tokens) > 1 and seconds > 0 else None

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


def is_one(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Return whether this is one prompt, and no list of them."""
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping | Integral))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Return the token ids of a text, or of messages by the tokenizer's chat template, ready for the answer.

    Raises:
        UserError: the tokenizer has no chat template, or its template refuses the messages.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if not all(isinstance(part, Mapping) for part in prompt) or not len(prompt):
        return list(map(int, prompt))
    if tokenizer.chat_template is None:
        raise UserError("the target's tokenizer has no chat template; give the prompt as one text")
    return chat_ids(tokenizer, prompt)


def chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    tools: list[dict] | None = None,
    system: str = "",
) -> list[int]:
    """Return the token ids of messages by the tokenizer's chat template, ready for the answer.

    Args:
        tokenizer: of the target.
        messages: each with a role and a content.
        tools: what the assistant may call, as JSON schemas.
        system: what the system says first. Where the template refuses that, the first message begins with it.

    Raises:
        UserError: the template is broken, or refuses the messages.
    """
    if system:
        try:
            return chat_ids(tokenizer, [{"role": "system", "content": system}, *messages], tools)
        except UserError:
            first, *others = messages
            messages = [{**first, "content": f"{system}\n\n{first['content']}"}, *others]
    advice = "give role and content, mend the template, or do without it (chat=false)"
    asked = {"add_generation_prompt": True, "return_dict": True, "tools": tools}
    return list(rendered(tokenizer, messages, "these messages", advice, **asked)["input_ids"])


def chat_template(tokenizer: PreTrainedTokenizerBase, has_tools: bool = False) -> str:
    """Return the template of messages; of several, the one named default, or tool_use for messages with tools.

    Raises:
        UserError: none of several is named default.
    """
    try:
        return tokenizer.get_chat_template(tools=[] if has_tools else None)
    except ValueError as error:
        names = ", ".join(tokenizer.chat_template)
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path} has the chat templates {names}, and none is named default; "
            "write the one to use to chat_template.jinja in the target's folder"
        ) from error


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping], name: str, advice: str, **asked: object
) -> object:
    """Return what `apply_chat_template` makes of messages, `asked` for by its options.

    Raises:
        UserError: the template is broken, or refuses them; it says their `name`, and the `advice`.
    """
    if isinstance(tokenizer.chat_template, dict):
        asked = {"chat_template": chat_template(tokenizer, asked.get("tools") is not None), **asked}
    try:
        return tokenizer.apply_chat_template(list(messages), **asked)
    except Exception as error:  # jinja and templates each raise their own types here
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} cannot render {name} ({why}); {advice}"
        ) from error


class Pieces:
    """Turns tokens into printable pieces of text, which together are the text that all tokens decode to.

    What later tokens can still change is held back: a character whose bytes are not all there, and spaces that the
    tokenizer may clean up. Special tokens, those in `dropped`, and ids that the tokenizer does not know have no text.
    The text ends before the first of the texts in `stop`, so what one of them may begin with is held back, too.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, dropped: Iterable[int] = (), stop: Sequence[str] = ()
    ) -> None:
        self.tokenizer, self.dropped, self.stop = tokenizer, frozenset(dropped), stop
        self.tokens: list[int] = []  # the last ones: the text of a token depends on its neighbours
        self.given = 0  # characters of their text that were given out
        self.held = ""  # given out so far but for a stop text, which may begin with it
        self.stopped = False
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_plain = backend is not None and not tokenizer.clean_up_tokenization_spaces
        self._decode = backend.decode if is_plain else tokenizer.decode  # which copies each list of ids first

    def add(self, token: int) -> str:
        """Return the text that can be printed now, which may be empty."""
        return self._before_stop(self._settled(token))

    def end(self) -> str:
        """Return what was held back, after the last token."""
        return self._before_stop(self._text(self.tokens)[self.given :]) + self.held

    def _before_stop(self, piece: str) -> str:
        text, self.held = self.held + piece, ""
        if self.stopped or not self.stop:
            return "" if self.stopped else text
        if found := [(place + len(stop), place) for stop in self.stop if (place := text.find(stop)) >= 0]:
            self.stopped = True
            return text[: min(found)[1]]  # of the one that is complete first
        begun = (n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        end = len(text) - max(begun, default=0)
        self.held = text[end:]
        return text[:end]

    def _settled(self, token: int) -> str:
        name = self.tokenizer.convert_ids_to_tokens(token)
        is_special = not self._text([token]) and self.tokenizer.decode([token])
        if name is None or is_special or token in self.dropped:
            return ""
        self.tokens.append(token)
        # If one byte of a run is wrong, all bytes of the run become U+FFFD, so it is known only when the run has ended.
        if BYTE.fullmatch(name):
            return ""
        text = self._text(self.tokens)
        settled = CLEANED.sub("", text) if self.tokenizer.clean_up_tokenization_spaces else text.removesuffix("\ufffd")
        piece = text[self.given : len(settled)]
        self.given = max(self.given, len(settled))
        if len(self.tokens) < 2 * CONTEXT_TOKENS:
            return piece
        # The last tokens are enough if what is held back, and the character before it, are their text, too.
        last = self._text(self.tokens[-CONTEXT_TOKENS:])
        if self.given and last.endswith(text[self.given - 1 :]):
            self.tokens, self.given = self.tokens[-CONTEXT_TOKENS:], self.given + len(last) - len(text)
        return piece

    def _text(self, tokens: list[int]) -> str:
        return self._decode(tokens, skip_special_tokens=True)
