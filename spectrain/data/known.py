"""What becomes of each field of a row and of a turn: it is read, refused, or named once as ignored (docs/data.md)."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping

CALL_ROLES = ("function_call", "tool_call")  # whose text is a call of a tool, as LLaMA-Factory and ms-swift write it
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(CALL_ROLES, "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
}

# Of rows.
TURNS = ("messages", "conversations", "conversation")  # usual names of columns of turns, in order
ALTERNATING = ("data", "dialog", "dialogue", *TURNS)  # columns of texts, a user's and an assistant's in turns
PAIRS = {  # kinds of rows in single texts: columns of the question and of the reply
    "instructions": (("instruction",), ("output", "response")),
    "prompts": (("prompt",), ("completion", "response", "answer", "canonical_solution")),
    "questions": (("question", "query", "problem", "input"), ("answer", "response", "solution", "output")),
}
BESIDE = ("input", "context")  # what belongs to a question, below it
TEXTS = ("text", "content", "article", "document")  # columns of plain text, beside which others may stand
SYSTEM = ("system", "system_prompt", "system_message", "system_instruction", "systemInstruction")
TOOLS = ("tools", "functions")  # as JSON schemas; the second are OpenAI's older ones, without a type
HISTORY = ("history",)  # earlier turns of a question, in LLaMA-Factory and ms-swift
LABELS = ("label", "kto_tag")  # false: a reply that was rejected, in TRL and LLaMA-Factory
PREFERENCES = ("chosen", "rejected")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")

OF_PAIRS = {*BESIDE, *SYSTEM, *HISTORY, *(name for both in PAIRS.values() for names in both for name in names)}
COLUMNS = {*OF_PAIRS, *ALTERNATING, *TEXTS, *PREFERENCES, "turns"}  # by which the header of a table is recognised

# Of turns.
SPEAKER = ("role", "from")
CONTENT = ("content", "value", "text", "parts")
CALLS = ("tool_calls", "function_call")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names by which rows and templates call them
ROW_THOUGHTS = THOUGHTS[:2]  # of a reply in a column of its own; beside it `reasoning` is often "on" or "off"
KEPT = ("tool_call_id", "name")  # of a turn, as they are
OF_TURNS = {*SPEAKER, *CONTENT, *CALLS, *THOUGHTS, *KEPT}
PARTIAL = ("train_detail",)  # axolotl's, of stretches of a turn

# Of both: whether something is learned, as OpenAI (weight), axolotl (train), ms-swift (loss) and others write it.
HIDING = ("mask", "masked")  # true where nothing is learned
MARKS = ("weight", "train", "training", "trainable", "loss", "loss_scale", "loss_mask", "step_loss_mask", *HIDING)
OF_CONVERSATIONS = (*SYSTEM, *TOOLS, *LABELS, *MARKS)  # columns that are read beside turns

# Names, also as the end of a longer one (prompt_id), of what says where a row is from or how it was judged.
METADATA = (
    "id ids idx index n number uuid hash key source origin url uri link path file language lang locale country "
    "timestamp date time created at version license model model_name generator author title topic category categories "
    "domain tag tags type dataset split subset difficulty score scores rating ratings rank quality count tokens "
    "length turn turns identifier ip toxic redacted moderation margin reference test test_list entry_point "
    "annotations"
)
_METADATA = re.compile(
    rf"(?!(images?|videos?|audios?)_|.+_turns?$)(.*_)?({METADATA.replace(' ', '|')})|(score|num|n)_.*", re.IGNORECASE
)


def is_off(name: str, value: object) -> bool | None:
    """Return True if a mark says "do not learn", False if it says "learn", None if its value is neither."""
    if isinstance(value, str):
        value = {"true": 1, "false": 0, "1": 1, "0": 0}.get(value.strip().lower().removesuffix(".0"))
    return None if value not in (0, 1) else bool(value) == (name in HIDING)


def unread(fields: Mapping, read: Container[str], said: Iterable[str] = ()) -> list[str]:
    """Return the names of fields that hold something which is neither read, nor said elsewhere, nor metadata."""
    nothing = (None, "", [], {}, *said)
    names = (name for name, value in fields.items() if name not in read and value not in nothing)
    return [f"`{name}`" for name in names if not _METADATA.fullmatch(str(name))]
