"""What a card says of the data, and that odd names change neither its metadata nor its commands."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from spectrain.config.groups import Corpus
from spectrain.config.training import Head, Online, Spire, Train, Vanilla
from spectrain.exports.cards import lookup_card, published, trained_card
from spectrain.exports.exporting import engine_path

CONFIG = Train(data=Online(row_tokens=64, batch_size=2), own=Vanilla())
TRAINED = {"steps": 3, "tokens": 384}
STORE = {"documents": 1, "tokens": 5, "built_from": {"keep": "all"}}
ODD_NAMES = ["no", "- a: b", "it's", 'a "b" c', "{{ 7 * 7 }}", "$(id)"]


@pytest.mark.parametrize(
    ("corpus", "said"),
    [
        ({"path": "/home/me/texts.jsonl"}, "- trained on documents of `texts.jsonl`, in rows of 64 tokens"),
        (
            {"path": "texts.jsonl", "max_documents": 8000},
            "- trained on up to 8,000 documents of `texts.jsonl`",
        ),
        ({"path": "responses:/home/me/a:b/c"}, "- trained on documents of `responses:a:b/c`"),
        ({"path": None, "max_documents": None}, "- trained on documents of the Python standard library, in rows"),
    ],
)
def test_a_card_names_its_corpus_and_how_much_of_it_was_read_but_not_where_it_lay(corpus, said):
    config = replace(CONFIG, corpus=Corpus(**corpus))
    card = trained_card("spire", "out", ("org/model", "f" * 16), config, TRAINED, ())
    assert said in card
    assert "/home/me" not in card
    assert "- 384 tokens in 3 optimizer steps" in card
    assert "5.0% of the documents" in card


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (Vanilla(), None),
        (Spire(input="tied", unembedding="target"), None),
        (Spire(input="trained", unembedding="target"), "The target's unembedding is not in this folder"),
        (Spire(input="projected", unembedding="target"), "The target's embedding and unembedding are not in"),
    ],
)
def test_a_card_says_what_a_drafter_reads_of_the_target(own, said):
    card = trained_card("spire", "out", ("org/model", "f" * 16), replace(CONFIG, own=own), TRAINED, ())
    assert said in card if said else "this folder" not in card


def commands(card: str) -> list[list[str]]:
    """The words of each shell command."""
    blocks = re.findall(r"```bash\n(.*?)\n```", card, re.DOTALL)
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_stay_one_word_everywhere(name):
    cards = {
        "vanilla": trained_card("vanilla", name, (name, "f" * 16), CONFIG, TRAINED, ()),
        "rest": lookup_card(name, (name, "f" * 16), "rest", {}, STORE),
    }
    for kind, card in cards.items():
        front, _, body = card.removeprefix("---\n").partition("\n---\n")
        assert yaml.safe_load(front)["base_model"] == name.rsplit("/", 1)[-1]
        assert f"\n# {name.rsplit('/', 1)[-1]}\n" in body
        ours, vllm, sglang, *_ = commands(card)
        assert f"target={name}" in ours
        assert name in vllm
        assert sglang[sglang.index("--model-path") + 1] == name
        given = {"vanilla": f"drafter={name}", "rest": f"datastore={name}/datastore"}
        assert given[kind] in ours
        for block in re.findall(r"```python\n(.*?)\n```", body, re.DOTALL):
            strings = [node.value for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Constant)]
            assert name in strings or "target-openvino" in strings  # which reads folders that were converted


def test_a_head_and_a_target_say_how_they_are_used():
    head = trained_card(
        "head", "out", ("org/model", "f" * 16), replace(CONFIG, own=Head(held_out_share=0.1)), {"steps": 30}, ()
    )
    assert "10.0% of the responses" in head
    assert "- 30 optimizer steps of 2 rows" in head
    assert commands(head)[0][3:5] == ["method=specdecpp", "head=out"]
    target = trained_card("target", "out", ("", ""), CONFIG, TRAINED, ())
    assert "## Target" not in target
    assert "base_model" not in target
    assert commands(target) == [["python", "-m", "spectrain.train", "+exp=spire", "target=out"]]


def test_cards_name_folders_as_given_and_no_machines_paths():
    assert published(Path("exported/spire")) == "exported/spire"
    assert published(Path("/home/somebody/exported/spire")) == "spire"
    assert engine_path("pystdlib-8l") == "checkpoints/pystdlib-8l"
    assert engine_path("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"
    assert engine_path("") == ""
