"""What a card says of the data, from a run's config."""

from __future__ import annotations

import pytest

from spectrain.reporting.model_card import Trained, trained_card


@pytest.mark.parametrize(
    ("corpus", "said"),
    [
        ({"path": "/home/me/texts.jsonl"}, "- trained on documents of `texts.jsonl`, in rows of 64 tokens"),
        (
            {"path": "texts.jsonl", "max_documents": 8000},
            "- trained on up to 8,000 documents of `texts.jsonl`",
        ),
        ({"path": None, "max_documents": None}, "- trained on documents of the Python standard library, in rows"),
    ],
)
def test_a_card_names_its_corpus_and_how_much_of_it_was_read_but_not_where_it_lay(corpus, said):
    config = {"corpus": corpus | {"held_out_share": 0.05}, "data": {"row_tokens": 64, "batch_size": 2}}
    card = trained_card(Trained("spire", "out", "org/model", "f" * 16, config, {"steps": 3, "tokens": 384}, ()))
    assert said in card
    assert "/home/me" not in card
    assert "- 384 tokens in 3 optimizer steps" in card
    assert "5.0% of the documents" in card
