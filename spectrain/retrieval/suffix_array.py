"""Build suffix arrays over token texts, and find the places of a context.

A text is one array of tokens in which every document ends with a separator, a token that no query holds, so that a
match never crosses a document's end, and a continuation stops there. Its suffix array lists the positions in the order
of the texts that begin there, so all occurrences of a context lie side by side. A store may be cut into shards, each
with its own array. Searches take an index, the tuples of the shards' (tokens, suffixes, bounds, pairs), and treat all
shards as one text.

Searches are compiled by numba, release the GIL, and read memory-mapped arrays in place.
"""

from __future__ import annotations

import numpy as np
from pydivsufsort import divsufsort

from spectrain.compiled import compiled, inner

MAX_SHARD_TOKENS = 2**28  # sorting takes 14 bytes per token of two bytes; its positions are int32
CHUNK_TOKENS = 2**22
TABLE_TOKENS = 3  # first tokens of a suffix that the tables `bounds` and `pairs` hold
FIRST_LENGTH = 4  # tokens of a suffix that is found about half the time
FEW_MATCHES = 16


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds every token and the separator, which is vocab_size itself."""
    return np.dtype(np.uint16 if vocab_size < 2**16 else np.uint32)


def build_suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Return [n] int32, the positions of the text in the order of the suffixes that begin there.

    A suffix comes before its extensions. tokens: [n] unsigned integers, n at most MAX_SHARD_TOKENS.

    Texts are sorted as bytes, which takes five bytes of memory per byte. Tokens are written with as few as tell the
    different ones apart, the most significant first, which keeps their order. Places inside a token are left out.
    """
    assert len(tokens) <= MAX_SHARD_TOKENS, len(tokens)
    if len(tokens) == 0:
        return np.zeros(0, dtype=np.int32)
    present = np.zeros(int(tokens.max()) + 1, dtype=bool)
    present[tokens] = True
    ranks = (np.cumsum(present) - 1).astype(">u4")
    width = max(1, (int(ranks[-1]).bit_length() + 7) // 8)
    text = np.empty((len(tokens), width), dtype=np.uint8)
    for start in range(0, len(tokens), CHUNK_TOKENS):
        piece = ranks[tokens[start : start + CHUNK_TOKENS]]
        text[start : start + CHUNK_TOKENS] = piece.view(np.uint8).reshape(-1, 4)[:, 4 - width :]
    places = divsufsort(text.reshape(-1))
    del text
    n_kept = 0
    for start in range(0, len(places), CHUNK_TOKENS):  # in place: no second array of this size
        piece = places[start : start + CHUNK_TOKENS]
        piece = piece[piece % width == 0] // width
        places[n_kept : n_kept + len(piece)] = piece
        n_kept += len(piece)
    return places[:n_kept].copy()  # so that the larger array is freed


def first_token_bounds(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return bounds [V + 2] int64: the suffixes that begin with token t are at bounds[t]..bounds[t + 1].

    Those of the separator are the last.
    """
    counts = np.zeros(vocab_size + 1, dtype=np.int64)
    for start in range(0, len(tokens), CHUNK_TOKENS):
        counts += np.bincount(tokens[start : start + CHUNK_TOKENS], minlength=vocab_size + 1)
    return np.concatenate([[0], np.cumsum(counts)])


def next_pairs(tokens: np.ndarray, suffixes: np.ndarray) -> np.ndarray:
    """Return the second and third token of each suffix, in suffix order, so sorted among those of one first token.

    They are [n] unsigned numbers, twice as wide as the tokens, with the second token in the upper half. Tokens past the
    end of the text are 0; a separator, which no query holds, comes before them.
    """
    wide = np.dtype(f"u{2 * tokens.dtype.itemsize}")
    pairs = np.zeros(len(tokens), dtype=wide)
    for start in range(0, len(tokens), CHUNK_TOKENS):
        piece, places = pairs[start : start + CHUNK_TOKENS], suffixes[start : start + CHUNK_TOKENS].astype(np.int64)
        for behind, shift in ((1, 8 * tokens.dtype.itemsize), (2, 0)):
            inside = places + behind < len(tokens)
            piece[inside] |= tokens[places[inside] + behind].astype(wide) << wide.type(shift)
    return pairs


@inner
def compare(tokens, position, context, begin, end):
    """Compare the text at `position` with context[begin:end]: 0 if it begins with it, -1 if it sorts before, else 1."""
    n_tokens = len(tokens)
    for i in range(begin, end):
        if position >= n_tokens:
            return -1
        token = np.int64(tokens[position])
        if token != context[i]:
            return -1 if token < context[i] else 1
        position += 1
    return 0


@inner
def _first_above(values, low, high, least):
    """Return the index of the first of the sorted values[low:high] that is at least `least`."""
    while low < high:
        middle = (low + high) // 2
        if np.uint64(values[middle]) < least:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def _first_place(tokens, suffixes, low, high, context, begin, end, least):
    """Return the first of the places low..high whose text behind its first three tokens compares as `least` or more."""
    while low < high:
        middle = (low + high) // 2
        if compare(tokens, suffixes[middle] + TABLE_TOKENS, context, begin, end) < least:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def find_range(tokens, suffixes, bounds, pairs, context, begin, end):
    """Return low, high: the suffixes of one shard that begin with context[begin:end], an empty range if none does.

    The first three tokens are looked up in tables, without a leap to the text at every step. In the remaining range,
    the lower end is found by halving, the upper end by doubling steps from there, as long contexts have few places.
    """
    first = context[begin]
    if first < 0 or first >= len(bounds) - 2:  # no token of the vocabulary, or the separator
        return 0, 0
    low, last = bounds[first], bounds[first + 1]
    if end - begin == 1:
        return low, last
    shift = np.uint64(8 * tokens.itemsize)
    least = np.uint64(context[begin + 1]) << shift
    more = np.uint64(1) << shift
    if end - begin > 2:
        least |= np.uint64(context[begin + 2])
        more = np.uint64(1)
    low = _first_above(pairs, low, last, least)
    last = _first_above(pairs, low, last, least + more)
    if end - begin <= TABLE_TOKENS:
        return low, last
    begin += TABLE_TOKENS
    low = _first_place(tokens, suffixes, low, last, context, begin, end, 0)
    step, inside = 1, low
    while inside + step <= last:
        if compare(tokens, suffixes[inside + step - 1] + TABLE_TOKENS, context, begin, end) != 0:
            break
        inside += step
        step *= 2
    return low, _first_place(tokens, suffixes, inside, min(inside + step, last), context, begin, end, 1)


@inner
def separator_of(index):
    """Return the token that closes each document; the tables of ranges have one more entry for it."""
    return len(index[2][0]) - 2


@inner
def find_ranges(index, context, length, ranges):
    """Write the places of the context's last `length` tokens to `ranges` [n_shards, 2]. Return their number."""
    tokens, suffixes, bounds, pairs = index
    end = len(context)
    total = 0
    for i in range(len(tokens)):
        low, high = find_range(tokens[i], suffixes[i], bounds[i], pairs[i], context, end - length, end)
        ranges[i, 0] = low
        ranges[i, 1] = high
        total += high - low
    return total


@compiled
def longest_suffix(index, context, min_length, max_length, ranges):
    """Find the longest suffix of the context, of min_length..max_length tokens, that is in the store.

    A store that holds a suffix also holds the shorter ones, so the length is found by halving. It is a few tokens in
    new text, and the maximum in copied text, so FIRST_LENGTH is tried first and then the longest. The places are
    written to `ranges` [n_shards, 2].

    Returns:
        Its length and the number of matches; 0, 0 if even the shortest is unknown.
    """
    longest, n_context = 0, len(context)
    separator = separator_of(index)
    while longest < min(max_length, n_context) and 0 <= context[n_context - 1 - longest] < separator:
        longest += 1
    known, matches, floor = 0, 0, min_length
    found = np.empty_like(ranges)
    length = max(min_length, min(FIRST_LENGTH, longest))
    while floor <= longest:
        total = find_ranges(index, context, length, found)
        if total > 0:
            known, matches, floor = length, total, length + 1
            for shard in range(len(found)):  # numba takes three seconds to compile a copy of arrays
                ranges[shard, 0], ranges[shard, 1] = found[shard, 0], found[shard, 1]
            if total <= FEW_MATCHES:  # checking how far each of them extends to the left is cheaper
                longest = _leftwards(index, context, length, longest, ranges)
                if longest > length:
                    matches = find_ranges(index, context, longest, ranges)
                return longest, matches
        else:
            longest = length - 1
        length = longest if length == FIRST_LENGTH and total > 0 else (floor + longest + 1) // 2
    return known, matches


@inner
def _leftwards(index, context, length, limit, ranges):
    """Return the longest suffix, at most `limit` tokens, to which a match of the last `length` tokens extends."""
    longest, n_context = length, len(context)
    tokens, suffixes, _, _ = index
    for shard in range(len(tokens)):
        text = tokens[shard]
        for i in range(ranges[shard, 0], ranges[shard, 1]):
            start, reached = suffixes[shard][i], length
            while reached < limit and start > 0 and text[start - 1] == context[n_context - 1 - reached]:
                start -= 1
                reached += 1
            longest = max(longest, reached)
    return longest


@compiled
def nth_match(index, ranges, n):
    """Return the shard of the n-th match and its position there."""
    suffixes = index[1]
    for shard in range(len(suffixes)):
        count = ranges[shard, 1] - ranges[shard, 0]
        if n < count:
            return shard, suffixes[shard][ranges[shard, 0] + n]
        n -= count
    return -1, -1
