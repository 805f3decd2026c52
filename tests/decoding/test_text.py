"""Text in, text out: what of a text can be printed while it is written."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spectrain.decoding.text import Pieces


def fast(model: models.Model, decoder: decoders.Decoder, **options) -> PreTrainedTokenizerFast:
    inner = Tokenizer(model)
    inner.decoder = decoder
    inner.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<turn>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", **options)  # <turn> has no role


def numbered(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


LETTERS = ["a", "n", "t", "s", "ve", ".", ",", "'", "\u2581", "\u2581a", "\u2581.", "\u20ac", "\ufffd"]
BYTES = "\u20ac\U0001f600".encode() + b"\xff a"
TOKENIZERS = {
    "byte fallback": fast(  # as Llama 2's
        models.BPE(numbered(["<unk>", *LETTERS, *(f"<0x{byte:02X}>" for byte in BYTES)]), [], byte_fallback=True),
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ),
    "byte level": fast(
        models.BPE(numbered(c for byte, c in bytes_to_unicode().items() if byte in BYTES), []), decoders.ByteLevel()
    ),
    "metaspace": fast(models.BPE(numbered(LETTERS), []), decoders.Metaspace()),
    "word pieces": fast(
        models.WordPiece(numbered(["[UNK]", *LETTERS[:8], "##a", "##t"]), unk_token="[UNK]"), decoders.WordPiece()
    ),
    "cleaned": fast(  # "do n't ." becomes "don't."
        models.WordLevel(numbered([*LETTERS[:8], "n't", "b"]), unk_token="a"),
        decoders.WordPiece(cleanup=False),
        clean_up_tokenization_spaces=True,
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_pieces_are_the_decoded_text_wherever_it_is_cut(name, data):
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer)), max_size=40))  # the last id is in no vocabulary
    pieces = Pieces(tokenizer, dropped=[3])
    said = "".join(map(pieces.add, tokens)) + pieces.end()
    assert said == tokenizer.decode([token for token in tokens if token != 3], skip_special_tokens=True)


def test_a_character_of_byte_tokens_is_given_out_once_their_run_has_ended():
    tokenizer = TOKENIZERS["byte fallback"]
    pieces, names = Pieces(tokenizer), ["\u2581a", "<0xE2>", "<turn>", "<0x82>", "<0xAC>", "s", "<0xE2>", "<0x82>"]
    given_out = [pieces.add(token) for token in tokenizer.convert_tokens_to_ids(names)]
    assert given_out == ["a", "", "", "", "", "\u20acs", "", ""]
    assert pieces.end() == "\ufffd\ufffd"  # the text ends within a character


@given(data=st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_text_ends_before_the_stop_text_that_is_complete_first_wherever_it_is_cut(data):
    tokenizer = TOKENIZERS["metaspace"]
    tokens = data.draw(st.lists(st.integers(0, 4), max_size=20))  # of a, n, t, s and ve
    stop = data.draw(st.lists(st.text("antsve", min_size=1, max_size=4), min_size=1, max_size=3))
    whole = tokenizer.decode(tokens)
    ends = sorted((n, n - len(one)) for n in range(len(whole) + 1) for one in stop if whole[:n].endswith(one))
    pieces = Pieces(tokenizer, stop=stop)
    said = [*map(pieces.add, tokens), pieces.end()]
    assert "".join(said) == (whole[: ends[0][1]] if ends else whole)


def test_what_cannot_begin_a_stop_text_is_given_out_at_once():
    tokenizer = TOKENIZERS["metaspace"]
    pieces = Pieces(tokenizer, stop=["nt."])
    names = ["a", "n", "t", "s", "n", "t", ".", "a"]
    assert [pieces.add(token) for token in tokenizer.convert_tokens_to_ids(names)] == [
        *("a", "", "", "nts", "", "", "", ""),
    ]
    assert (pieces.end(), pieces.stopped) == ("", True)
