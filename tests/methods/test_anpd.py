"""ANPD: the chain of the likeliest tokens, worked out by hand, and that it changes no text."""

from spectrain.methods.anpd import AdaptiveNgram
from spectrain.target import Source
from tests.methods.drafts import proposed


def test_chain_by_hand():
    # Behind 1: twice 2, once 3. Behind 2: 4, then 5 (later). Behind 1 2: likewise. Behind 1 2 5: 1.
    text = [1, 2, 4, 1, 3, 1, 2, 5, 1]
    tree = proposed(AdaptiveNgram(draft_tokens=4), [text])
    # Context 5 1 is new, 1 gives 2; 1 2 gives 5 (equal counts: the latest); 1 2 5 gives 1; 1 2 5 1 is new, 2 5 1 and
    # 5 1 too, 1 gives 2.
    assert tree.tokens.tolist() == [[1, 2, 5, 1, 2]]
    assert tree.source.tolist() == [[Source.ROOT] + [Source.INPUT] * 4]
    assert tree.is_chain


def test_higher_orders_decide_first():
    text = [7, 1, 8, 2, 1, 9, 2, 1, 9, 7, 1]
    assert proposed(AdaptiveNgram(draft_tokens=1), [text]).tokens.tolist() == [[1, 8]]  # behind 7 1, seen once
    assert proposed(AdaptiveNgram(2, draft_tokens=1), [text]).tokens.tolist() == [[1, 9]]  # behind 1, seen twice
