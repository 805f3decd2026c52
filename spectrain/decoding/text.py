"""Text in, text out: prompts as token ids, replies, and the pieces of a stream."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from numbers import Integral

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)
    return not is_list or (len(prompt) > 0 and isinstance(prompt[0], Mapping | Integral))


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
    with told(tokenizer, name, advice):
        return tokenizer.apply_chat_template(list(messages), **asked)


@contextmanager
def told(tokenizer: PreTrainedTokenizerBase, name: str, advice: str) -> Iterator[None]:
    """Turn what a chat template raises into a UserError that says what it was to render, and the `advice`."""
    try:
        yield
    except Exception as error:  # jinja and templates each raise their own types here
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} cannot render {name} ({why}); {advice}"
        ) from error


class _Speller:
    """Says which tokens have a text, and what several of them together spell.

    Special tokens, those in `dropped`, and ids that the tokenizer does not know have no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dropped: Iterable[int] = ()) -> None:
        self.tokenizer, self.dropped = tokenizer, frozenset(dropped)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_plain = backend is not None and not tokenizer.clean_up_tokenization_spaces
        self._decode = backend.decode if is_plain else tokenizer.decode  # which copies each list of ids first

    def _name(self, token: int, alone: str) -> str | None:
        """Return the name of a token that has a text, else None. `alone` is what it spells by itself."""
        is_special = not alone and self.tokenizer.decode([token])
        return None if is_special or token in self.dropped else self.tokenizer.convert_ids_to_tokens(token)

    def _text(self, tokens: list[int]) -> str:
        return self._decode(tokens, skip_special_tokens=True)


class TokenBytes(_Speller):
    """The bytes that each token adds to a text, also of tokens that hold a part of a character.

    Together they are the text's UTF-8. Only spaces that a tokenizer cleans up after they were written stay in them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dropped: Iterable[int] = ()) -> None:
        super().__init__(tokenizer, dropped)
        self._before, self._said = [], ""  # the last tokens that have a text, and that
        self._n_characters = 0  # of the text so far that are complete
        self._known: dict[tuple, bytes] = {}
        self._utf8 = getincrementaldecoder("utf-8")("replace")

    def of(self, token: int) -> bytes:
        """Return what a token would add now: the first of a text may lose the space that it begins with."""
        key = tuple(self._before) if self.tokenizer.clean_up_tokenization_spaces else bool(self._before), token
        if key not in self._known:
            self._known[key] = self._bytes(token)
        return self._known[key]

    def add(self, token: int) -> int:
        """Let a token be written. Return the place in the text of the character that it begins in."""
        added, has_begun = self.of(token), bool(self._utf8.getstate()[0])
        goes_on = 0x80 <= (added or b"\x80")[0] < 0xC0  # the character that has begun, which is wrong otherwise
        place = self._n_characters + (has_begun and not goes_on)
        self._n_characters += len(self._utf8.decode(added))
        if self._name(token, self._text([token])) is not None:
            self._before = [*self._before[1 - CONTEXT_TOKENS :], token]
            self._said = self._text(self._before)
        return place

    def _bytes(self, token: int) -> bytes:
        alone = self._text([token])
        name = self._name(token, alone)
        if name is None:
            return b""
        is_byte = BYTE.fullmatch(name)
        if is_byte or "\ufffd" in alone:
            of_name = _bytes_by_character()
            own = bytes.fromhex(name[3:5]) if is_byte else bytes(of_name[c] for c in name if c in of_name)
            if own.decode(errors="replace") == alone:
                return own
        after = self._text([*self._before, token])
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(self._said, after, strict=False))
        return after[len(self._said) if after.startswith(self._said) else len([*alike]) :].encode()


@cache
def _bytes_by_character() -> dict[str, int]:
    """Return the bytes that the characters of names stand for in byte-level tokenizers."""
    return {character: byte for byte, character in bytes_to_unicode().items()}


class Pieces(_Speller):
    """Turns tokens into printable pieces of text, which together are the text that all tokens decode to.

    What later tokens can still change is held back: a character whose bytes are not all there, and spaces that the
    tokenizer may clean up. The text ends before the first of the texts in `stop`, so what one of them may begin with is
    held back, too.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, dropped: Iterable[int] = (), stop: Sequence[str] = ()
    ) -> None:
        super().__init__(tokenizer, dropped)
        self.stop = stop
        self.tokens: list[int] = []  # the last ones: the text of a token depends on its neighbours
        self.given = 0  # characters of their text that were given out
        self.held = ""  # given out so far but for a stop text, which may begin with it
        self.stopped = False

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
        name = self._name(token, self._text([token]))
        if name is None:
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
