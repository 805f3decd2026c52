"""Calls of tools in the text of an answer."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from pydantic_core import to_json
from tokenizers import decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spectrain.decoding.loop import TokenLogprobs
from spectrain.decoding.text import TokenBytes
from spectrain.serving.replies import AnswerText, chat_logprobs, completion_logprobs, read_tool_calls
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


CALLS = {  # by what a model writes: the name and the arguments of each call
    CALL: [("look_up", {"a": {"b": 1}})],
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': [("f", {"a": 1})],  # JSON text already
    '<tool_call>{"name": "f", "arguments": ""}</tool_call><tool_call>{"name": "g"}</tool_call>': [
        ("f", {}),
        ("g", {}),
    ],
    '{"name": "f", "parameters": {"a": "\\u20ac"}}': [("f", {"a": "\u20ac"})],  # Llama 3
    '[{"name": "f", "arguments": {"a": null}}, {"name": "g", "arguments": {}}]': [("f", {"a": None}), ("g", {})],
    '{"type": "function", "function": {"name": "f", "arguments": "{}"}}': [("f", {})],
    '{"name": "f\\ud800", "arguments": {"\\udc00": "\\ud800"}}': [("f\ufffd", {"\ufffd": "\ufffd"})],  # halves
}


@pytest.mark.parametrize("text", CALLS)
@pytest.mark.parametrize("n_together", [3, 1000])
def test_arguments_are_the_json_text_of_an_object_however_the_model_writes_a_call(text, n_together):
    tokens = TOKENIZER.convert_tokens_to_ids([bytes_to_unicode()[byte] for byte in text.encode()])
    answer = AnswerText(TOKENIZER, (), (), offers_tools=True)
    for start in range(0, len(tokens), n_together):
        step = tokens[start : start + n_together]
        assert answer.add(step, [1] * len(step)) == []
    assert answer.end() == []
    read = [one["function"] for one in answer.tool_calls]
    assert [(one["name"], json.loads(one["arguments"])) for one in read] == CALLS[text]
    assert to_json(answer.tool_calls)
    assert len({one["id"] for one in answer.tool_calls}) == len(read)


@pytest.mark.parametrize("arguments", ['"not JSON"', '"[1]"', '"null"', "[1]", "1", "true", "NaN", '{"a": 1e400}'])
def test_calls_whose_arguments_are_no_object_stay_text(arguments):
    for text in ('{"name": "f", "arguments": %s}', '<tool_call>{"name": "f", "arguments": %s}</tool_call>'):
        assert read_tool_calls(text % arguments) is None
    assert read_tool_calls('{"name": 5, "arguments": {}}') is None
    assert read_tool_calls('{"name": "Ada"}') is None


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


def test_log_probabilities_of_parts_of_characters_look_as_openai_writes_them():
    """Whole or in parts, as a stream has them."""
    names = [bytes_to_unicode()[byte] for byte in "a\u20ac!".encode()]
    tokens = [*TOKENIZER.convert_tokens_to_ids(names), TOKENIZER.bos_token_id]
    found = [
        TokenLogprobs(-1.0, [(token, -1.0), (other, -2.0)]) for token, other in zip(tokens, tokens[::-1], strict=True)
    ]
    for cuts in ([0, 6], [0, 2, 3, 6]):
        spelled, of_completion = TokenBytes(TOKENIZER), TokenBytes(TOKENIZER)
        chat, offsets, texts, tops = [], [], [], []
        for start, stop in pairwise(cuts):
            chat += chat_logprobs(spelled, tokens[start:stop], found[start:stop])["content"]
            completion = completion_logprobs(of_completion, tokens[start:stop], found[start:stop])
            offsets += completion["text_offset"]
            texts += completion["tokens"]
            tops += completion["top_logprobs"]
        parts = ["\\xe2", "\\x82", "\\xac"]
        assert [one["token"] for one in chat] == ["a", *parts, "!", "<s>"]
        assert [one["bytes"] for one in chat] == [[97], [0xE2], [0x82], [0xAC], [33], []]
        assert [one["token"] for one in chat[1]["top_logprobs"]] == ["\\xe2", "!"]
        assert texts == ["a", *(f"bytes:{part}" for part in parts), "!", "<s>"]
        assert offsets == [0, 1, 1, 1, 2, 3]  # in a text of three characters
        assert tops[1] == {"bytes:\\xe2": -1.0, "!": -2.0}
