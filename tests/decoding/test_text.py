"""Text in, text out: what of a text can be printed while it is written."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spectrain.decoding.text import Pieces, TokenBytes


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


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - {"cleaned"}))
@given(data=st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_bytes_of_tokens_are_together_those_of_the_text(name, data):
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer)), max_size=20))
    text = tokenizer.decode([token for token in tokens if token != 3], skip_special_tokens=True)
    spelled = TokenBytes(tokenizer, dropped=[3])
    said, places = zip(*((spelled.of(token), spelled.add(token)) for token in [*tokens, 3]), strict=True)
    if "\ufffd" not in text:  # else bytes are given out as they were written
        assert b"".join(said) == text.encode()
        assert places[-1] == len(text)
    if name == "byte level":  # where all wrong bytes count as in Python
        before = [b"".join(said[:n]).decode(errors="replace") for n in range(len(said) + 1)]
        whole = [n for n, one in enumerate(said) if one and not 0x80 <= one[0] < 0xC0]
        assert [places[n] for n in whole] == [len(before[n]) for n in whole]


TEXTS = [
    "\u20acuro, k\u016f\u0148",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e8\U0001f1ff",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9",
    "a\u0301  b\n\tc",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_tokens_that_are_a_part_of_a_character_have_its_bytes(name, text):
    if name == "byte level":
        tokenizer = fast(models.BPE(numbered(bytes_to_unicode().values()), []), decoders.ByteLevel())
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        vocabulary = numbered(["<unk>", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))])
        decoder = TOKENIZERS[name].backend_tokenizer.decoder
        tokenizer = fast(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"), decoder)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    spelled = TokenBytes(tokenizer)
    said, places = zip(*((spelled.of(one), spelled.add(one)) for one in tokenizer(text)["input_ids"]), strict=True)
    assert [bytes([byte]) for byte in text.encode()] == [one for one in said if one]
    starts = [n for n, character in enumerate(text) for _ in character.encode()]
    assert [place for place, one in zip(places, said, strict=True) if one] == starts
