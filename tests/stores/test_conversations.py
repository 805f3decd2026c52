"""Conversations of corpora: their shapes, and which tokens of the chat template the assistant wrote."""

from __future__ import annotations

import json
import logging

import pytest
from datasets import Dataset

from spectrain.errors import UserError
from spectrain.stores.conversations import chat_tokens, messages_of
from spectrain.stores.packing import token_documents
from spectrain.stores.texts import END_OF_TEXT, Skipped, read_documents, train_tokenizer

TURNS = [("system", "Be kind."), ("user", "Hi"), ("assistant", " Ho! "), ("user", "Ho! Why?"), ("assistant", "Hi")]
MESSAGES = [{"role": role, "content": text} for role, text in TURNS]
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": text} for role, text in TURNS]
TEMPLATE = (
    "{%% for m in messages %%}<{{ m['role'] }}>{%% if m['role'] == 'assistant' %%}"
    f"%s{{{{ m['content'] | trim }}}}{END_OF_TEXT}%s"
    "{%% else %%}{{ m['content'] }}{%% endif %%}{{ '\\n' }}{%% endfor %%}"
)
PLAIN, MARKED = TEMPLATE % ("", ""), TEMPLATE % ("{% generation %}", "{% endgeneration %}")
REFUSING = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}" + PLAIN


def tokenizer_with(template: str | None):
    tokenizer = train_tokenizer(["<user>Hi Ho! Why? <assistant>Be kind.\n" * 3], 280)
    tokenizer.chat_template = template
    return tokenizer


def written(tokenizer, ids, is_assistant) -> list[str]:
    """The stretches of text that the assistant wrote."""
    stretches, before = [], False
    for token, is_own in zip(ids, is_assistant, strict=True):
        if is_own:
            stretches[len(stretches) if not before else -1 :] = [[*(stretches[-1] if before else []), token]]
        before = is_own
    return [tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_the_tokens_of_every_reply_are_marked_and_no_others(template):
    tokenizer = tokenizer_with(template)
    ids, is_assistant = chat_tokens(tokenizer, MESSAGES, "a.jsonl:1")
    text = "<system>Be kind.\n<user>Hi\n<assistant>Ho!<|endoftext|>\n<user>Ho! Why?\n<assistant>Hi<|endoftext|>\n"
    assert tokenizer.decode(ids) == text
    assert written(tokenizer, ids, is_assistant) == ["Ho!<|endoftext|>", "Hi<|endoftext|>"]


def test_a_template_that_changes_earlier_replies_is_followed():
    """As those of reasoning models, which leave the thoughts of all turns but the last out."""
    thoughts = "{% set text = m['content'] if loop.last else m['content'].split('</t>')[-1] %}"
    template = PLAIN.replace("<{{ m['role'] }}>", thoughts + "<{{ m['role'] }}>").replace("m['content'] |", "text |")
    tokenizer = tokenizer_with(template)
    messages = [{**m, "content": "<t>why</t>" + m["content"]} if m["role"] == "assistant" else m for m in MESSAGES]
    ids, is_assistant = chat_tokens(tokenizer, messages, "a.jsonl:1")
    expected = ["Ho!<|endoftext|>", "<t>why</t>Hi<|endoftext|>"]
    assert written(tokenizer, ids, is_assistant) == expected


def test_both_shapes_of_all_kinds_of_files_are_conversations(tmp_path):
    rows = [{"id": "1", "messages": MESSAGES}, {"id": "2", "messages": MESSAGES[1:3]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).to_parquet(tmp_path / "b.parquet")
    Dataset.from_list(rows).save_to_disk(tmp_path / "c")
    (tmp_path / "d.jsonl").write_text(json.dumps({"conversations": SHAREGPT, "source": "x"}))
    (tmp_path / "e.jsonl").write_text(json.dumps({"chat": [{**m, "weight": None} for m in MESSAGES], "text": "x"}))
    for name, expected in (("a.jsonl", 2), ("b.parquet", 2), ("c", 2), ("d.jsonl", 1)):
        found = list(read_documents(str(tmp_path / name)))
        assert [document.messages for document in found] == [MESSAGES, MESSAGES[1:3]][:expected], name
    assert next(iter(read_documents(str(tmp_path / "e.jsonl"), ["chat"]))).messages == MESSAGES
    plain = next(iter(read_documents(str(tmp_path / "e.jsonl"))))
    assert (plain.text, plain.messages) == ("x", None)


def test_pieces_of_text_are_joined_and_halves_of_characters_replaced():
    pieces = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\ud800"}]
    assert messages_of([{"role": "user", "content": pieces, "name": None}], "x") == [
        {"role": "user", "content": "ab\ufffd"}
    ]


def test_conversations_without_a_reply_are_counted_and_skipped_with_a_sentence(tmp_path, caplog):
    silent = [[MESSAGES[1]], [MESSAGES[1], {"role": "assistant", "content": " "}]]
    rows = [{"messages": messages} for messages in (*silent, MESSAGES)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    skipped = Skipped()
    with caplog.at_level(logging.WARNING):
        assert [d.id for d in read_documents(str(tmp_path / "a.jsonl"), skipped=skipped)] == ["a.jsonl:3"]
    assert skipped.without_assistant == 2
    assert "left out, without an assistant turn: 2 conversations" in caplog.text


def test_a_turn_that_is_none_and_a_template_that_fails_are_said_with_the_row(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": [{"type": "image"}]}]}))
    with pytest.raises(UserError, match=r"line 1 of a\.jsonl has a turn 1 without a role or a text"):
        list(read_documents(str(file)))
    file.write_text("\n" + json.dumps({"messages": MESSAGES}))
    refused = r"cannot render the conversation a\.jsonl:2 \(begin with a user\)"
    with pytest.raises(UserError, match=refused):
        list(token_documents(read_documents(str(file)), tokenizer_with(REFUSING)))


def test_without_a_template_a_conversation_is_one_text(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES[1:3]}))
    tokenizer = tokenizer_with(None)
    with caplog.at_level(logging.WARNING):
        (document,) = token_documents(read_documents(str(tmp_path / "a.jsonl")), tokenizer)
    assert tokenizer.decode(document.tokens) == "Hi\n\n Ho! "
    assert document.is_response is None
    assert "1 conversations are read as plain texts" in caplog.text
