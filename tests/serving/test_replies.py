"""Calls of tools in the text of an answer."""

from __future__ import annotations

import json

import pytest
from tokenizers import decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spectrain.serving.replies import AnswerText, read_tool_calls
from tests.decoding.test_text import fast, numbered

TOKENIZER = fast(models.BPE(numbered(bytes_to_unicode().values()), []), decoders.ByteLevel())  # a token for each byte

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"a": {"b": 1}}}\n</tool_call>'


def test_calls_of_tools_are_read_or_left_as_text():
    (call, second) = read_tool_calls(f"{CALL}\n{CALL}")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look_up", {"a": {"b": 1}})
    assert (call["index"], second["index"], call["type"]) == (0, 1, "function")
    assert call["id"] != second["id"]
    for text in ("", CALL[:-3], f"{CALL} and so on", CALL.replace("name", "nome"), CALL.replace("{", "{{")):
        assert read_tool_calls(text) is None
    assert read_tool_calls("<tool_call>{" + '"a":{' * 5000 + "}" * 5001 + "</tool_call>") is None
    assert read_tool_calls("<tool_call>[1]</tool_call>") is None


@pytest.mark.parametrize(
    ("rest", "is_call"), [(CALL, True), ("<tool_box>", False), ("<tool_call>nothing", False), (f"{CALL}STOPa", True)]
)
@pytest.mark.parametrize("n_together", [1, 3, 1000])
def test_what_begins_like_a_call_is_held_back_until_it_is_known(rest, is_call, n_together):
    tokens = TOKENIZER.convert_tokens_to_ids([bytes_to_unicode()[byte] for byte in f"well {rest}".encode()])
    text, shown = AnswerText(TOKENIZER, (), ("STOP",), offers_tools=True), ""
    for start in range(0, len(tokens), n_together):
        step = tokens[start : start + n_together]
        shown += "".join(piece for piece, _ in text.add(step, [1] * len(step)))
        assert "<tool_call>" not in shown
    assert text.has_stopped == ("STOP" in rest)
    shown += "".join(piece for piece, _ in text.end())
    assert bool(text.tool_calls) == is_call
    assert shown == ("well " if is_call else f"well {rest}")
