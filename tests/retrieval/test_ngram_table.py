"""The incremental tables against slow searches of the whole text, and the rules by hand."""

from hypothesis import given
from hypothesis import strategies as st

from spectrain.retrieval.ngram_table import CountTable, PositionTable

TEXTS = st.lists(st.integers(0, 3), max_size=60)
CUTS = st.lists(st.integers(1, 7), max_size=30)


def in_pieces(text: list[int], cuts: list[int]) -> list[list[int]]:
    """The text in pieces of the given lengths, the rest as the last one; the first may be empty."""
    pieces, start = [text[:0]], 0
    for cut in cuts:
        pieces.append(text[start : start + cut])
        start += cut
    return [*pieces, text[start:]]


def slow_continuation(text: list[int], max_ngram: int, match: str, horizon: int, limit: int, extra: tuple) -> list[int]:
    """Searches the text from end to end for each suffix."""
    whole = text + list(extra)
    for n in range(min(max_ngram, len(whole)), 0, -1):
        starts = [p for p in range(n, len(text)) if text[p - n : p] == whole[-n:]]  # p: the token behind an occurrence
        if not starts:
            continue
        if match == "latest_full":
            full = [p for p in starts if len(text) - p >= horizon]
            start = full[-1] if full else starts[0]
        else:
            start = starts[-1] if match == "latest" else starts[0]
        return text[start : start + limit]
    return []


@given(
    text=TEXTS,
    cuts=CUTS,
    max_ngram=st.integers(1, 4),
    match=st.sampled_from(["latest", "earliest", "latest_full"]),
    horizon=st.integers(1, 9),
    limit=st.integers(1, 12),
    extra=st.lists(st.integers(0, 4), max_size=3).map(tuple),
)
def test_continuation_equals_a_search_of_the_whole_text(text, cuts, max_ngram, match, horizon, limit, extra):
    table = PositionTable([], max_ngram, match, horizon)
    for piece in in_pieces(text, cuts):
        table.extend(piece)
        expected = slow_continuation(table.tokens, max_ngram, match, horizon, limit, extra)
        assert table.continuation(limit, extra)[0] == expected
    assert table.tokens == text


def slow_likeliest(text: list[int], context: list[int]) -> int | None:
    """Counts the tokens behind a context; of equal counts the one seen last."""
    n = len(context)
    followers = [text[p] for p in range(n, len(text)) if text[p - n : p] == context]
    return max(followers, key=lambda t: (followers.count(t), len(followers) - followers[::-1].index(t)), default=None)


def slow_chain(text: list[int], max_order: int, limit: int) -> list[int]:
    chain: list[int] = []
    while len(chain) < limit:
        whole = text + chain
        found = [slow_likeliest(text, whole[-n:]) for n in range(min(max_order - 1, len(whole)), 0, -1)]
        known = [token for token in found if token is not None]
        if not known:
            break
        chain.append(known[0])
    return chain


@given(text=TEXTS, cuts=CUTS, max_order=st.integers(2, 6), limit=st.integers(1, 12))
def test_chain_equals_counting_the_whole_text(text, cuts, max_order, limit):
    table = CountTable([], max_order)
    for piece in in_pieces(text, cuts):
        table.extend(piece)
        assert [token for token, _ in table.chain(limit)] == slow_chain(table.tokens, max_order, limit)


def test_the_length_of_what_matched_is_told():
    table = PositionTable([1, 2, 3, 4, 9, 2, 3, 5, 2, 3])
    assert table.continuation(2) == ([5, 2], 2)
    assert table.continuation(2, (4,)) == ([9, 2], 3)
    assert table.continuation(2, (8,)) == ([], 0)
    assert CountTable([1, 2, 3, 9, 1, 2], max_order=4).chain(3) == [(3, 2), (9, 3), (1, 3)]
