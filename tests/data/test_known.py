"""Every field of a row or a turn is read, refused, or named once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from spectrain.data import known
from spectrain.data.chats import Tally
from spectrain.data.packing import Tokeniser
from spectrain.data.texts import read_documents, train_tokenizer
from spectrain.errors import UserError

TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}<{{ m.role }} {{ m.name }} {{ m.tool_call_id }}>"
    "{{ m.reasoning_content }}|{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant{% endif %}"
)
ASKED, REPLIED, CALL = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"name": "f"}


def pair(**more) -> dict:
    return {"question": "Hi", "answer": "Ho", **more}


def turn(name: str, value: object) -> dict:
    """A conversation whose reply has this field."""
    kept = {
        key: one for key, one in REPLIED.items() if name not in (known.CONTENT if key == "content" else known.SPEAKER)
    }
    return {"messages": [ASKED, {**kept, name: value}, *([ASKED, REPLIED] if name in known.MARKS else [])]}


def both(make, names, one, other) -> dict:
    return {(make.__name__, name): (make(name, one), make(name, other)) for name in names}


def row(name: str, value: object) -> dict:
    return pair(**{name: value})


def question(name: str, value: object) -> dict:
    return {name: value, next(replies for asked, replies in known.PAIRS.values() if name in asked)[0]: "Ho"}


def reply(name: str, value: object) -> dict:
    return {next(asked for asked, replies in known.PAIRS.values() if name in replies)[0]: "Hi", name: value}


def column(name: str, value: object) -> dict:
    return {name: value}


ROWS = {"chosen": "Ho", "prompt": "Hi", "rejected": "x"}
OTHERS = {  # rows with two values of each field that is read
    **both(row, known.SYSTEM, "S", {"parts": [{"text": "T"}]}),
    **both(row, (*known.BESIDE, *known.ROW_THOUGHTS), "S", "T"),
    **both(row, known.TOOLS, [{"name": "a"}], json.dumps([{"name": "b"}])),
    **both(row, known.HISTORY, [["a", "b"]], [{"role": "user", "content": "c"}, REPLIED]),
    **both(row, (*known.LABELS, *known.MARKS), True, 0),
    **both(question, [name for asked, _ in known.PAIRS.values() for name in asked], "S", "T"),
    **both(reply, [name for _, replies in known.PAIRS.values() for name in replies], "S", "T"),
    **both(column, known.TEXTS, "S", "T"),
    **both(column, known.TURNS, [ASKED, REPLIED], json.dumps([ASKED, {**REPLIED, "content": "x"}])),
    **both(column, known.ALTERNATING, ["Hi", "S"], ["Hi", "T"]),
    **both(turn, known.SPEAKER, "gpt", "user"),
    **both(turn, known.CONTENT, "S", [{"text": "T"}]),
    **both(turn, known.CALLS[:1], [{"function": CALL, "id": "1"}], [{"function": CALL, "id": "2"}]),
    **both(turn, known.CALLS[1:], CALL, {"name": "g", "arguments": '{"a": 1}'}),
    **both(turn, (*known.THOUGHTS, *known.KEPT), "S", "T"),
    **both(turn, known.MARKS, "false", 1),
    ("preference", "chosen"): ({**ROWS, "chosen": "S"}, {**ROWS, "chosen": "T"}),
}


@pytest.fixture
def packed(tmp_path):
    """What is packed of rows: tokens and masks; and what is said of the rows."""
    tokenizer = train_tokenizer(["<user>Hi Ho! Why? <assistant>Be kind.\n" * 3], 290)
    tokenizer.chat_template = TEMPLATE

    def call(*rows: dict) -> tuple[list, str]:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tally = Tally("a.jsonl")
        documents = list(read_documents(str(tmp_path / "a.jsonl"), tally=tally))
        found = Tokeniser(tokenizer).tokens(documents)
        return [
            (one.tokens.tolist(), one.is_response is not None and one.is_response.tolist()) for one in found
        ], tally.say()

    return call


@pytest.mark.parametrize("case", OTHERS, ids=" ".join)
def test_another_value_of_a_field_that_is_read_changes_what_is_packed(packed, case):
    (one, said), (other, _) = map(packed, OTHERS[case])
    assert one != other
    assert "ignored" not in said


def test_all_fields_that_are_read_have_been_tried():
    tried = {name for _, name in OTHERS}
    assert tried >= (known.COLUMNS | known.OF_TURNS | {*known.OF_CONVERSATIONS}) - {"rejected", "turns"}


def test_every_other_field_is_named_once_and_metadata_is_not(packed):
    metadata = {name: "x" for word in known.METADATA.split() for name in (word, f"my_{word}", word.upper())}
    metadata = {name: "x" for name in metadata if name not in ("my_turn", "my_turns")}
    others = {"persona": "S", "image_path": "a", "previous_turns": "b", "examples": [1], "loss": 0.5}
    rows = [pair(**metadata, **others, empty="", prompted="Hi")] * 3
    turned = {"messages": [{**ASKED, "mood": "x", "train": True}, {**REPLIED, "label": "y", "id": 1}], "style": "z"}
    found, said = packed(*rows, turned, {"text": "a", "system": "S", "label": 0})
    assert len(found) == 5
    assert said.split("ignored: ")[1] == (
        "`persona` in 3 rows, `image_path` in 3 rows, `previous_turns` in 3 rows, `examples` in 3 rows, "
        "`loss` in 3 rows, `style` in 1 rows, `mood` of turns in 1 rows, `train` of others' turns in 1 rows "
        "and 3 more fields"
    )


REFUSED = {
    **{name: (pair(**{name: ["a.png"]}), f"has {name}, which cannot be read") for name in known.MEDIA},
    "train_detail": (turn("train_detail", [{"begin_offset": 0}]), "only a part is to be learned (train_detail)"),
    "weight": (turn("weight", 0.5), "has a turn with the weight 0.5; give 0 or 1, or true or false"),
    "loss_mask": (turn("loss_mask", [0, 1]), "has a turn with the loss_mask [0, 1]; give 0 or 1"),
    "message": (
        {"messages": [{"role": "user", "message": "Hi"}]},
        "has a turn without content, but with role, message",
    ),
    "history": (pair(history="a"), "has a history that is no list of pairs"),
    "context": (pair(context={"a": 1}), "has no text as 'context'"),
    "system": (pair(system=3), "has 'system' that is no text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_learned_wrongly_is_refused(packed, name):
    given, sentence = REFUSED[name]
    with pytest.raises(UserError, match=re.escape(sentence)):
        packed(given)


def test_the_table_of_the_docs_is_that_of_the_code():
    text = Path(__file__).parents[2].joinpath("docs", "data.md").read_text()
    lines = text.split("| field | in | effect |")[1].split("\n\n")[0].splitlines()[2:]
    found = [tuple(re.findall(r"`([^`]+)`", line.split("|")[1])) for line in lines]
    visible = known.MARKS[: -len(known.HIDING)]
    assert found == [
        *(known.SYSTEM, known.TOOLS, known.HISTORY, known.BESIDE, known.LABELS, known.ROW_THOUGHTS),
        *(known.CALLS, known.THOUGHTS, known.KEPT, visible, known.HIDING),
        *(known.MEDIA, known.PARTIAL, (), ()),
    ]
    metadata = text.split("how it was judged: ")[1].split(". ")[0]
    assert re.findall(r"`([^`]+)`", metadata) == known.METADATA.split()
