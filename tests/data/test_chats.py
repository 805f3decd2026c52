"""Chat data in all its common formats, and rows that are broken."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
from collections import Counter

import pytest
from datasets import Dataset

from spectrain.data.chats import Broken, Chat, Tally, read_row
from spectrain.data.prompts import Question, read_prompts
from spectrain.data.tabular_files import READ_CHARACTERS, file_rows
from spectrain.data.texts import read_documents
from spectrain.errors import UserError


def turns(*texts: str, system: str = "") -> list[dict]:
    found = [{"role": "system", "content": system}] if system else []
    return [*found, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))]


def sharegpt(*texts: str | None) -> list[dict]:
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]


CALL = {"name": "weather", "arguments": {"town": "Ulm"}}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CALLING = [
    {"role": "user", "content": "Warm?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "No."},
]
ASSISTANT, SYSTEM = {"role": "assistant", "content": None}, [{"role": "system", "content": "S"}]
SAID = [CALLING[0], {**CALLING[1], "content": None, "name": None}, *CALLING[2:]]
AS_TEXT = {**CALL, "arguments": json.dumps(CALL["arguments"])}
LLAMA_FACTORY = [
    {"from": "human", "value": "Warm?"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "4"},
    {"from": "gpt", "value": "No."},
]
ROWS = {
    "ShareGPT": ({"id": "a", "conversations": sharegpt("Hi", "Ho")}, "conversations", turns("Hi", "Ho")),
    "its system": (
        {"system": "S", "conversations": sharegpt("Hi", "Ho")},
        "conversations",
        turns("Hi", "Ho", system="S"),
    ),
    "OpenAI": ({"messages": turns("Hi", "Ho"), "text": "x"}, "conversations", turns("Hi", "Ho")),
    "LMSYS": ({"model": "m", "conversation": turns("Hi", "Ho")}, "conversations", turns("Hi", "Ho")),
    "own column": ({"text": "x", "dialogue": turns("Hi", "Ho")}, "conversations", turns("Hi", "Ho")),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b\ud800"}]}]},
        *("conversations", turns("ab\ufffd")),
    ),
    "thoughts": (
        {"messages": [*turns("Hi"), {"role": "assistant", "reasoning_content": "Hm", "content": "Ho", "weight": 1}]},
        *("conversations", [*turns("Hi"), {"role": "assistant", "content": "Ho", "reasoning_content": "Hm"}]),
    ),
    "tools": ({"tools": TOOLS, "messages": SAID}, "conversations", CALLING),
    "arguments as text": (
        {"messages": [SAID[0], {**SAID[1], "tool_calls": [{"function": AS_TEXT}]}, *SAID[2:]]},
        *("conversations", CALLING),
    ),
    "older calls": (
        {
            "functions": [TOOLS[0]["function"]],
            "messages": [SAID[0], {**ASSISTANT, "function_call": AS_TEXT}, *SAID[2:]],
        },
        *("conversations", CALLING),
    ),
    "Orca": ({"system_prompt": "S", "question": "Hi", "response": "Ho"}, "questions", turns("Hi", "Ho", system="S")),
    "system twice": (
        {"system_prompt": "S", "messages": turns("Hi", system="S ")},
        "conversations",
        [*SYSTEM, *turns("Hi")],
    ),
    "history": (
        {"instruction": "And", "input": "you?", "output": "I", "system": "S", "history": [["Hi", "Ho"]]},
        *("instructions", turns("Hi", "Ho", "And\nyou?", "I", system="S")),
    ),
    "history in a cell": (
        {"query": "And?", "response": "I", "history": '[["Hi", "Ho"]]'},
        *("questions", turns("Hi", "Ho", "And?", "I")),
    ),
    "context": ({"question": "Hi?", "context": ["a", "b"], "answer": "Ho"}, "questions", turns("Hi?\na\nb", "Ho")),
    "Nemotron": (
        {"system_prompt": "S", "input": turns("Hi"), "output": "Ho", "reasoning": "on"},
        *("questions", turns("Hi", "Ho", system="S")),
    ),
    "thoughts beside": (
        {"question": "Hi", "thinking": "Hm", "answer": "Ho"},
        *("questions", [*turns("Hi"), {**ASSISTANT, "content": "Ho", "reasoning_content": "Hm"}]),
    ),
    "Alpaca's preference": (
        {"instruction": "Add.", "input": "1 1", "chosen": "2", "rejected": "3"},
        *("preferences", turns("Add.\n1 1", "2")),
    ),
    "LLaMA-Factory": ({"tools": json.dumps(TOOLS), "conversations": LLAMA_FACTORY}, "conversations", CALLING),
    "Alpaca": ({"instruction": "Add.", "input": "1 1", "output": "2"}, "instructions", turns("Add.\n1 1", "2")),
    "Dolly": ({"instruction": "Hi", "context": "", "response": "Ho"}, "instructions", turns("Hi", "Ho")),
    "completion": ({"prompt": "def f():\n", "completion": "    pass"}, "prompts", turns("def f():\n", "    pass")),
    "its turns": ({"prompt": turns("Hi"), "completion": turns("Hi", "Ho")[1:]}, "prompts", turns("Hi", "Ho")),
    "GSM8K": ({"question": "1 + 1?", "answer": "2"}, "questions", turns("1 + 1?", "2")),
    "MetaMath": ({"query": "1 + 1?", "response": "2", "type": "x"}, "questions", turns("1 + 1?", "2")),
    "UltraChat": ({"id": "0", "data": ["Hi", "Ho", "He", "Ha"]}, "conversations", turns("Hi", "Ho", "He", "Ha")),
    "Spec-Bench": ({"question_id": 1, "category": "c", "turns": ["Hi"]}, "questions", turns("Hi")),
    "DPO": ({"chosen": turns("Hi", "Ho"), "rejected": turns("Hi", "x")}, "preferences", turns("Hi", "Ho")),
    "its prompt": (
        {"prompt": "Hi", "chosen": turns("Hi", "Ho"), "rejected": turns("Hi", "x")},
        *("preferences", turns("Hi", "Ho")),
    ),
    "its texts": ({"prompt": "Hi", "chosen": "Ho", "rejected": "x"}, "preferences", turns("Hi", "Ho")),
    "LLaMA-Factory's": (
        {"conversations": sharegpt("Hi"), "chosen": sharegpt("", "Ho")[1], "rejected": sharegpt("", "x")[1]},
        *("preferences", turns("Hi", "Ho")),
    ),
    "JSON in a cell": ({"messages": json.dumps(turns("Hi", "Ho"))}, "conversations", turns("Hi", "Ho")),
    "other columns of null": (
        {"messages": None, "chosen": None, "rejected": None, "prompt": "Hi", "completion": "Ho"},
        *("prompts", turns("Hi", "Ho")),
    ),
    "turns as response": ({"prompt": turns("Hi"), "response": turns("", "Ho")[1:]}, "prompts", turns("Hi", "Ho")),
    "its replies": (
        {"prompt": turns("Hi"), "chosen": turns("", "Ho")[1:], "rejected": turns("", "x")[1:]},
        *("preferences", turns("Hi", "Ho")),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_each_shape_is_the_conversation_that_it_holds(name):
    row, kind, messages = ROWS[name]
    found = read_row(row)
    assert (found.kind, found.chat.messages, found.mended) == (kind, messages, ())
    assert found.chat.tools == (TOOLS if row.keys() & {"tools", "functions"} else None)


def test_plain_texts_are_a_column_of_text_or_the_only_one():
    for row in ({"text": "a", "url": "b"}, {"text": "a", "prompt": "b"}, {"id": 1, "content": "a"}, {"body": "a"}):
        assert read_row(row).text == "a"
    assert read_row({"a": "x", "b": "y", "c": None}, ["a", "b", "c"]).text == "x\n\ny"
    assert read_row({"a": ["x", {"content": "y"}]}, ["a"]).text == "x\n\ny"
    assert read_row({"chat": sharegpt("Hi", "Ho"), "text": "x"}, ["chat"]).chat.messages == turns("Hi", "Ho")


def test_marks_of_turns_are_those_of_the_replies_that_they_stand_at():
    said = turns("Hi", "Ho", "So?", "I", "And?", "Er")
    for marks, unlearned in (
        ({1: {"weight": 0}, 3: {"weight": 1}}, (0,)),
        ({0: {"train": False}, 1: {"train": True}, 5: {"train": False}}, (2,)),
        ({1: {"masked": True}, 3: {"masked": False}, 5: {"loss_mask": "0"}}, (0, 2)),
    ):
        found = read_row({"messages": [{**turn, **marks.get(number, {})} for number, turn in enumerate(said)]})
        assert (found.chat.messages, found.chat.unlearned) == (said, unlearned)
        assert found.chat.answered() == found.chat
    bad, good = ({"role": "assistant", "content": text, "weight": text == "good"} for text in ("bad", "good"))
    mixed = read_row({"messages": [*turns("Hi"), bad, good]}).chat
    assert (mixed.replies, mixed.unlearned) == (2, (0,))
    both = read_row({"messages": [{**said[0], "name": "a"}, {**said[0], "name": "b"}, *said[1:2]]}).chat.messages
    assert [message.get("name") for message in both] == ["a", "b", None]


def test_rejected_replies_are_kept_out_of_a_corpus_and_their_prompts_are_asked(tmp_path):
    rows = [{"prompt": f"Hi {n}", "completion": "Ho", "label": n % 2 == 0} for n in range(4)]
    rows += [{"messages": turns("Hi 4", "Ho"), "kto_tag": "false"}, {"messages": turns("Hi 5", "Ho"), "weight": 0.0}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": "bad", "label": 0}]))
    tally = Tally("a.jsonl")
    found = list(read_documents(str(tmp_path / "a.jsonl"), tally=tally))
    assert [one.text for one in found] == ["Hi 0\n\nHo", "Hi 2\n\nHo", "bad"]
    assert "2 marked as not to be learned (`label`), 1 marked as not to be learned (`kto_tag`)" in tally.say()
    assert [one.turns[0] for one in read_prompts(tmp_path / "a.jsonl")] == [*(f"Hi {n}" for n in range(6)), "bad"]
    Dataset.from_list(rows[:4]).to_parquet(tmp_path / "a.parquet")
    assert len(list(read_documents(str(tmp_path / "a.parquet"), ["prompt", "completion"]))) == 4  # texts
    turned = [{"c": turns("Hi", "Ho"), "label": False, "system_prompt": "S"}, {"c": turns("Hi", "Ho"), "label": True}]
    Dataset.from_list(turned).to_parquet(tmp_path / "b.parquet")
    assert len(list(read_documents(str(tmp_path / "b.parquet"), "c"))) == 1


def test_calls_have_objects_as_arguments_without_nulls_of_arrow_and_halves_of_characters():
    cases = [(None, {}), ({"a": None, "b": 1}, {"b": 1}), ({"q": "\ud83d"}, {"q": "\ufffd"})]
    for given, expected in (*cases, ('{"a": null}', {"a": None})):  # in a text, the null is the model's own
        calls = [{"function": {"name": "f", "arguments": given}}]
        row = {"messages": [*turns("Hi"), {"role": "assistant", "content": None, "tool_calls": calls}]}
        assert read_row(row).chat.messages[1]["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    ("turned", "messages", "mended"),
    [
        (sharegpt("Hi", "Ho", "And?", None), turns("Hi", "Ho", "And?"), ["cut at an empty turn"]),
        (sharegpt("Hi", " "), turns("Hi"), ["cut at an empty turn"]),
        (sharegpt(None, "Ho"), [], ["cut at an empty turn"]),
        ([], [], []),
        (sharegpt("Hi", "Ho")[1:] + sharegpt("Hi", "Ho"), turns("Hi", "Ho"), ["without the reply that it began with"]),
        (
            sharegpt("Hi")[:1] * 2 + sharegpt("", "Ho")[1:] * 2,
            turns("Hi\n\nHi", "Ho\n\nHo"),
            ["with neighbouring turns of one speaker joined"],
        ),
        ([{"from": "system", "value": ""}, *sharegpt("Hi", "Ho")], turns("Hi", "Ho"), []),
        (
            [{"from": "system", "value": text} for text in ("Not Bob.", "Bob")] + sharegpt("Hi"),
            turns("Hi", system="Not Bob.\n\nBob"),
            ["with neighbouring turns of one speaker joined"],
        ),
        (sharegpt("Hi", "Ho", "And?"), turns("Hi", "Ho", "And?"), []),
    ],
)
def test_broken_conversations_have_one_fate(turned, messages, mended):
    found = read_row({"conversations": turned})
    assert (found.chat.messages, list(found.mended)) == (messages, mended)


BROKEN = {
    "kind": ({"name": "x", "version": "1"}, "has the columns name, version, which are those of no conversation"),
    "role": ({"messages": [{"role": "narrator", "content": "x"}]}, "has a turn of 'narrator'"),
    "role of no kind": ({"messages": [{"role": ["user"], "content": "x"}]}, r"has a turn of \['user'\]"),
    "a turn alone": ({"role": "user", "content": "x"}, "is a turn, where conversations are expected"),
    "no turn": ({"messages": [*turns("Hi"), None]}, "something else than turns with roles in 'messages'"),
    "calls": ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "calls of tools that are no list"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content that is no text"),
    "number as turn": ({"messages": [{"role": "user", "content": 3}]}, "a turn with content that is no text"),
    "call": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "a call of a tool without a name"),
    "schemas": ({"messages": turns("Hi"), "tools": "x"}, "tools that are no list"),
    "chosen": ({"chosen": "Ho", "rejected": "x"}, "a chosen reply without a prompt"),
    "two columns": ({"a": turns("Hi"), "b": turns("Hi")}, "has turns in the columns a and b"),
    "number": ({"question": 3, "answer": "x"}, "has no text as 'question'"),
    "empty turn": ({"question_id": 1, "turns": ["a", " "]}, "has an empty turn"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_said(name):
    row, sentence = BROKEN[name]
    with pytest.raises(Broken, match=sentence):
        read_row(row)
    with pytest.raises(Broken, match="has no column 'c'"):
        read_row({"a": "x"}, ["c"])


CONVERSATIONS = [{"conversations": sharegpt(f"Hi {n}", f"Ho {n}")} for n in range(3)]
LINED = "".join(json.dumps(row) + "\n" for row in CONVERSATIONS)
FILES = {
    "array.json": json.dumps(CONVERSATIONS, indent=1).encode(),
    "short.json": b"\xef\xbb\xbf" + json.dumps(CONVERSATIONS).encode(),
    "lines.json": LINED.encode(),
    "two.json": (json.dumps(CONVERSATIONS[:2]) + "\n" + json.dumps(CONVERSATIONS[2:])).encode(),
    "CAPITAL.JSON": json.dumps(CONVERSATIONS).encode(),
    "in.json": json.dumps({"version": "1", "data": CONVERSATIONS}).encode(),
    "a.jsonl": LINED.encode(),
    "a.jsonl.gz": gzip.compress(LINED.encode()),
    "array.json.bz2": bz2.compress(json.dumps(CONVERSATIONS).encode()),
}


@pytest.mark.parametrize("name", [*FILES, "a.parquet", "saved"])
def test_every_kind_of_file_gives_the_same_conversations(tmp_path, name, caplog):
    if name in FILES:
        (tmp_path / name).write_bytes(FILES[name])
    elif name == "saved":
        Dataset.from_list(CONVERSATIONS).save_to_disk(tmp_path / name)
    else:
        Dataset.from_list(CONVERSATIONS).to_parquet(tmp_path / name)
    with caplog.at_level(logging.INFO):
        found = [document.chat for document in read_documents(str(tmp_path / name))]
    assert found == [Chat(turns(f"Hi {n}", f"Ho {n}")) for n in range(3)]
    assert "3 conversations, 3 assistant turns" in caplog.text
    asked = read_prompts(tmp_path / name)
    assert [question.turns for question in asked] == [(f"Hi {n}",) for n in range(3)]


def test_one_object_is_one_row_and_tables_have_rows(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps({"messages": turns("Hi", "Ho")}, indent=1))
    (tmp_path / "a.csv").write_text('question,answer\n"1, please\n+ 1?",2\n')
    (tmp_path / "a.tsv").write_text("question\tanswer\n1 + 1?\t2\n")
    found = {name: next(iter(read_documents(str(tmp_path / name)))).chat for name in ("one.json", "a.csv", "a.tsv")}
    assert found["one.json"] == Chat(turns("Hi", "Ho"))
    assert [found[name].messages[0]["content"] for name in ("a.csv", "a.tsv")] == ["1, please\n+ 1?", "1 + 1?"]


IN_A_CELL = '"' + json.dumps(turns("1, please + 1?", "2")).replace('"', '""') + '"'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "\ufeffquestion;answer;context\n1, please + 1?;2;\n"),
        ("a.csv", 'question\tanswer\n"1, please + 1?"\t2\n'),
        ("a.tsv", 'question,answer\n"1, please + 1?",2\n'),
        ("a.csv", 'id, question, answer\n3, "1, please + 1?", 2\n'),
        ("a.csv", '"a, b";question;answer\n;1, please + 1?;2\n'),
        ("a.tsv", "question|answer\n1, please + 1?|2\n"),
        ("a.csv", 'prompt;completion\n"[{""role"": ""user"", ""content"": ""1, please + 1?""}]";2\n'),
        ("a.csv", f"chosen;rejected\n{IN_A_CELL};3\n"),
    ],
)
def test_the_header_tells_what_separates_the_columns(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert [one.chat.messages for one in read_documents(str(tmp_path / name))] == [turns("1, please + 1?", "2")]


def test_a_table_of_one_column_keeps_its_indentation_and_two_of_one_name_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text\n    def f(): pass\n")
    assert [one.text for one in read_documents(str(tmp_path / "a.csv"))] == ["    def f(): pass"]
    (tmp_path / "a.csv").write_text("question,answer,answer\n1,2,3\n")
    with pytest.raises(UserError, match="row 1 of a.csv has two columns of one name"):
        list(read_documents(str(tmp_path / "a.csv")))


def test_a_long_array_is_read_piece_by_piece(tmp_path):
    rows = [{"text": "x" * 1000 + str(n)} for n in range(3 * READ_CHARACTERS // 1000)]
    (tmp_path / "long.json").write_text(json.dumps(rows))
    assert [row for _, row in file_rows(tmp_path / "long.json", "long.json")] == rows


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", b'[{"text": "a"}, {"text": ', "a.json is not JSON behind row 1"),
        ("a.json", b'{"text": "a"', "a.json is not JSON"),
        ("a.json", b'[1, "x"]', "row 1 of a.json is no JSON object but 1"),
        ("a.json", b"[]", None),
        ("a.csv", "größe\nx".encode("latin-1"), "a.csv is not UTF-8"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be read"),
        ("a.parquet", b"no parquet", "a.parquet cannot be read"),
        ("a.jsonl", b'{"name": "x", "version": "1"}', "line 1 of a.jsonl has the columns name, version"),
        ("a.jsonl", b"[" * 100000, "line 1 of a.jsonl cannot be read"),
        ("a.json", b'[{"role": "user", "content": "Hi"}]', "row 1 of a.json is a turn"),
        ("a.jsonl", b'{"text": NaN}', "line 1 of a.jsonl cannot be read"),
        ("a.jsonl", b'{"text": "a"}\n{text', "line 2 of a.jsonl is not JSON"),
        ("a.jsonl", "größe".encode("latin-1"), "line 1 of a.jsonl is not UTF-8"),
    ],
)
def test_files_that_hold_no_rows_are_one_sentence(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    if sentence is None:
        assert list(read_documents(str(tmp_path / name))) == []
        return
    with pytest.raises(UserError) as said:
        list(read_documents(str(tmp_path / name)))
    assert sentence in str(said.value)
    assert "\n" not in str(said.value)


def test_few_broken_rows_are_counted_and_listed_and_many_refuse_the_source(tmp_path):
    bad, silent = {"messages": [{"role": "narrator", "content": "x"}]}, {"messages": turns("Hi")}
    rows = [*[{"messages": turns("Hi", "Ho", "And?")}] * 17, bad, silent, {"messages": []}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tally = Tally()
    found = list(read_documents(str(tmp_path / "a.jsonl"), tally=tally))
    assert [document.chat.messages for document in found] == [turns("Hi", "Ho")] * 17
    assert (tally.kinds, tally.skipped) == (Counter(conversations=17), Counter(empty=1) + Counter(["without a reply"]))
    left_out = "2 skipped: 1 without a reply, 1 empty, 1 that cannot be read: line 18 of a.jsonl has a turn of"
    assert f"17 conversations, 17 assistant turns, {left_out}" in tally.say()
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [rows[0], *[bad] * 50]))
    with pytest.raises(
        UserError, match=r"line 2 of b\.jsonl has a turn of 'narrator'.*, and 9 of the other 10 rows alike;"
    ):
        list(read_documents(str(tmp_path / "b.jsonl")))


def test_settings_beside_texts_are_left_out_of_a_folder(tmp_path, caplog):
    (tmp_path / "package.json").write_text('{"name": "x", "version": "1"}')
    (tmp_path / "tsconfig.json").write_text("// no JSON")
    (tmp_path / "chats.json").write_text(json.dumps(CONVERSATIONS))
    (tmp_path / "a.md").write_text("text")
    with caplog.at_level(logging.WARNING):
        assert [document.id for document in read_documents(str(tmp_path))] == [
            "a.md",
            *(f"chats.json:{n}" for n in (1, 2, 3)),
        ]
    assert "left out, a table without conversations, questions or texts: package.json" in caplog.text


def test_prompts_of_conversations_keep_what_the_system_says_and_end_at_a_tool(tmp_path):
    rows = [
        {"messages": turns("Hi", "Ho", "And?", "x", system="S")},
        {"messages": [*turns("Hi", "Ho"), *SAID, *turns("And?", "x")], "tools": TOOLS},
        {"text": "Once"},
        {"question": "And?", "answer": "x", "history": [["Hi", "Ho"]], "system_prompt": "S"},
    ]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_prompts(tmp_path / "mixed.jsonl") == [
        Question("mixed-1", "mixed", ("Hi", "And?"), "S"),
        Question("mixed-2", "mixed", ("Hi", "Warm?"), tools=TOOLS),
        Question("mixed-3", "mixed", ("Once",)),
        Question("mixed-4", "mixed", ("Hi", "And?"), "S"),
    ]


def test_a_folder_of_files_has_the_prompts_of_all(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(CONVERSATIONS[:2]))
    assert [question.id for question in read_prompts(tmp_path)] == ["a-1", "a-2", "b-1", "b-2"]
