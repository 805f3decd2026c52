"""Prompt files: which format is read, what is refused, how a conversation becomes token ids."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from spectrain.data.prompts import Question, conversation_ids, read_prompts
from spectrain.data.texts import train_tokenizer
from spectrain.errors import UserError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def write(tmp_path):
    """Writes rows (dicts, or text as it is) to a prompt file."""

    def to_file(*rows: dict | str, name: str = "file.jsonl") -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return to_file


@pytest.fixture
def tokenizer():
    return train_tokenizer([f"say {i} and go on, user, assistant" for i in range(50)], vocab_size=300)


def spec_bench(number: object = 81, **changes) -> dict:
    return {"question_id": number, "category": "writing", "turns": ["First.", "Second."], **changes}


def test_spec_bench_keeps_ids_categories_and_turns(write):
    path = write(spec_bench(81), spec_bench("b", category="maths", turns=["Only."], reference=["x"]))
    assert read_prompts(path) == [
        Question("81", "writing", ("First.", "Second.")),
        Question("b", "maths", ("Only.",)),
    ]


def test_rows_without_an_id_are_numbered(write):
    rows = [{"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "..."}, {"question": "1 + 1?", "answer": "2"}]
    assert read_prompts(write(*rows, {"prompt": "b", "more": 1})) == [
        Question("HumanEval/0", "file", ("def f():\n",)),
        Question("file-2", "file", ("1 + 1?",)),
        Question("file-3", "file", ("b",)),
    ]


def test_questions_are_asked_as_in_a_paper(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write({"question": "1 + 1?", "answer": "2"}, spec_bench(2), name="sums.jsonl")
    first, second = read_prompts("gsm8k_8shot:sums.jsonl")
    assert first.id == "sums-1"
    assert first.turns[0].startswith("Q: There are 15 trees in the grove.")
    assert first.turns[0].endswith("23 - 15 is 8. The answer is 8.\n\nQ: 1 + 1?\nA:")
    assert first.turns[0].count("\nA: ") == 8
    assert second.turns[1] == "Second."
    write({"article": "It rains.", "highlights": "Rain.", "id": "x"}, name="news.jsonl")
    assert read_prompts("summarize:news.jsonl")[0].turns == ("Summarize: It rains.",)
    with pytest.raises(UserError, match="prompts=code is a format of questions; give prompts=code:<file of questions>"):
        read_prompts("code")


def test_lines_end_at_line_feeds_only_and_empty_lines_count_but_are_skipped(write):
    path = write('{"prompt": "a\u2028b"}', "", '{"prompt":\r"c"}\r')
    assert [(q.id, q.turns) for q in read_prompts(path)] == [("file-1", ("a\u2028b",)), ("file-3", ("c",))]


def test_a_byte_order_mark_is_no_part_of_the_first_row(write):
    assert read_prompts(write('\ufeff{"prompt": "a"}'))[0].turns == ("a",)


def test_limit_reads_the_first_and_looks_no_further(write):
    path = write({"prompt": "a"}, {"prompt": "b"}, "not JSON")
    assert [q.turns for q in read_prompts(path, limit=2)] == [("a",), ("b",)]
    for limit in (0, -1, 1.5, True):
        with pytest.raises(UserError, match=f"limit={limit} must be a whole number of at least 1"):
            read_prompts(path, limit=limit)


BAD_FILES = {
    "not JSON": ([{"prompt": "a"}, "{prompt: b}"], ["line 2 of file.jsonl is not JSON"]),
    "no object": (['["a"]'], ["line 1 of file.jsonl", 'no JSON object but ["a"]']),
    "unknown keys": ([{"a": 1, "b": 2}], ["line 1 of file.jsonl has the columns a, b, which are those of no"]),
    "number for a text": ([{"prompt": 3}], ["line 1", "no text as 'prompt'"]),
    "no turns": ([spec_bench(turns=[])], ["line 1", "empty turn, or none"]),
    "id of no kind": ([spec_bench([1])], ["file.jsonl:1 has the id [1]"]),
    "same id": ([spec_bench(1), spec_bench("1")], ["file.jsonl:2 repeats the id '1'"]),
    "empty file": ([""], ["file.jsonl has no question"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_in_one_sentence(write, case):
    rows, parts = BAD_FILES[case]
    with pytest.raises(UserError) as caught:
        read_prompts(write(*rows))
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert "\n" not in message


def test_missing_files_and_questions_are_named(tmp_path, write, caplog):
    with pytest.raises(UserError, match=r"prompts=\S+no\.jsonl does not exist; give a file"):
        read_prompts(tmp_path / "no.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no question"):
        read_prompts(tmp_path / "empty")
    with caplog.at_level(logging.WARNING):
        assert len(read_prompts(write({"prompt": "a"}, {"prompt": " \n"}))) == 1
    assert "1 prompts, 1 skipped: 1 without a question" in caplog.text


def test_a_conversation_without_template_is_one_text(tokenizer):
    ids = conversation_ids(tokenizer, ["say 1", "go on", "and 2"], [tokenizer("1 it is")["input_ids"], "on"])
    assert tokenizer.decode(ids) == "say 1\n1 it is\ngo on\non\nand 2"
    assert conversation_ids(tokenizer, ["say 1"], []) == tokenizer("say 1")["input_ids"]


def test_a_conversation_alternates_in_the_template(tokenizer):
    tokenizer.chat_template = TEMPLATE
    ids = conversation_ids(tokenizer, ["say 1", "go on"], ["1"])
    end = tokenizer.eos_token
    assert tokenizer.decode(ids) == f"<user>say 1{end}<assistant>1{end}<user>go on{end}<assistant>"
    assert conversation_ids(tokenizer, ["say 1"], [], chat=False) == tokenizer("say 1")["input_ids"]


@pytest.mark.parametrize("end", ["special end of text", "ordinary end of text", "special end of turn"])
def test_a_reply_s_end_is_not_doubled(tokenizer, end):
    if end == "ordinary end of text":
        tokenizer.eos_token = "on"
    if end == "special end of turn":
        tokenizer.add_tokens("<|end|>", special_tokens=True)
    end_id = tokenizer.convert_tokens_to_ids("<|end|>") if end == "special end of turn" else tokenizer.eos_token_id
    tokenizer.chat_template = TEMPLATE
    reply = tokenizer("1 it is")["input_ids"]
    ended = conversation_ids(tokenizer, ["say 1", "go"], [[*reply, end_id]])
    assert ended == conversation_ids(tokenizer, ["say 1", "go"], [reply])
    assert tokenizer.decode(ended).count(tokenizer.eos_token) == 3


def test_a_system_that_the_template_refuses_stands_in_the_first_turn(tokenizer):
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    ids = conversation_ids(tokenizer, ["say 1"], [], system="Be kind.")
    assert ids == conversation_ids(tokenizer, ["Be kind.\n\nsay 1"], [])
    tokenizer.chat_template = TEMPLATE + "{{ tools }}"
    asked = conversation_ids(tokenizer, ["say 1"], [], system="Be kind.", tools=[{"name": "x"}])
    end = tokenizer.eos_token
    assert tokenizer.decode(asked) == f"<system>Be kind.{end}<user>say 1{end}<assistant>[{{'name': 'x'}}]"


def test_chat_without_a_template_is_refused(tokenizer):
    with pytest.raises(UserError, match="chat=true, but the target's tokenizer has no chat template; use chat=false"):
        conversation_ids(tokenizer, ["say 1"], [], chat=True)


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages[0].nothing.more }}", "{{ 1 / 0 }}"])
def test_a_broken_template_is_one_sentence(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="the chat template of .* cannot render these messages .*chat=false") as said:
        conversation_ids(tokenizer, ["say 1"], [])
    assert "\n" not in str(said.value)
