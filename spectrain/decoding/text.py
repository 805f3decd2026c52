"""Text in, text out: prompts as token ids, replies, and the pieces of a stream.

target = load_target("pystdlib-8l")
method = load_method("pld", target)
reply = method.generate("def read_config(path):", max_new_tokens=64)
for piece in method.stream([{"role": "user", "content": "Hello"}], temperature=0.8):
    print(piece, end="")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from spectrain.decoding.generation import Generation
from spectrain.errors import UserError

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
    """Return the token ids of a text, or of messages by the tokenizer's chat template, ready for the answer.

    Raises:
        UserError: the tokenizer has no chat template, or its template refuses the messages.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise UserError("the target's tokenizer has no chat template; give the prompt as one text")
    return chat_ids(tokenizer, prompt)


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], tools: list[dict] | None = None
) -> list[int]:
    """Return the token ids of messages by the tokenizer's chat template, ready for the answer.

    `tools` are what the assistant may call, as JSON schemas.

    Raises:
        UserError: the template is broken, or refuses the messages.
    """
    advice = "give role and content, mend the template, or do without it (chat=false)"
    asked = {"add_generation_prompt": True, "return_dict": True, "tools": tools}
    return list(rendered(tokenizer, messages, "these messages", advice, **asked)["input_ids"])


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping], name: str, advice: str, **asked: object
) -> object:
    """Return what `apply_chat_template` makes of messages, `asked` for by its options.

    Raises:
        UserError: the template is broken, or refuses them; it says their `name`, and the `advice`.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), **asked)
    except Exception as error:  # jinja and templates each raise their own types here
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} cannot render {name} ({why}); {advice}"
        ) from error


class Pieces:
    """Turns tokens into printable pieces of text: a character is held back until all its bytes are there."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.pending: list[int] = []  # tokens whose text is not complete
        self.before: list[int] = []  # the last tokens that were given out

    def add(self, token: int) -> str:
        """Return the text that can be printed now; empty while a character is incomplete."""
        self.pending.append(token)
        known = self.tokenizer.decode(self.before)
        text = self.tokenizer.decode(self.before + self.pending)[len(known) :]
        if text.endswith("\ufffd") and len(self.pending) < LONGEST_CHARACTER:
            return ""
        self.before, self.pending = (self.before + self.pending)[-CONTEXT_TOKENS:], []
        return text
