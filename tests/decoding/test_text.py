"""Text in, text out: `method.generate` and `method.stream`."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spectrain import load_method, load_target
from spectrain.decoding import Sampling, generate
from spectrain.decoding.text import Pieces
from spectrain.errors import UserError

PROMPT = "def read_config(path):"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def target():
    return load_target()


def test_a_method_by_name_writes_the_targets_own_text_and_counts_what_was_accepted(target):
    plain = load_method("autoregressive", target).generate(PROMPT, max_new_tokens=40)
    reply = load_method("pld", target, draft_tokens=4).generate(PROMPT, max_new_tokens=40)
    assert reply.text == plain.text == str(reply)
    assert (plain.drafted, plain.accepted, plain.acceptance_length) == (0, 0, 1.0)
    steps = reply.generation.target_forwards
    assert reply.accepted + steps + 1 == len(reply.generation.tokens) == 40
    assert reply.acceptance_length == pytest.approx(39 / steps)
    assert 0 < reply.accepted <= reply.drafted


def test_sampling_options_and_seed_are_those_of_the_loop(target):
    method = load_method("anpd", target)
    options = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    reply = method.generate(PROMPT, 24, **options)
    prompt = target.tokenizer(PROMPT)["input_ids"]
    (expected,) = generate(target, method, [prompt], 24, Sampling(0.9, 20, 0.9, 0.01), seed=3)
    assert reply.generation.tokens == expected.tokens
    assert method.generate(PROMPT, 24, **{**options, "seed": 4}).generation.tokens != expected.tokens


@pytest.mark.parametrize("n_new", [1, 40])
def test_pieces_of_a_stream_are_the_text(target, n_new):
    method = load_method("pld", target)
    pieces = list(method.stream(PROMPT, n_new))
    assert "".join(pieces) == method.generate(PROMPT, n_new).text
    assert n_new == 1 or len(pieces) > 5


def test_a_stream_that_is_left_ends_and_the_method_can_be_used_again(target):
    method = load_method("pld", target)
    stream = method.stream(PROMPT, 200)
    first = next(stream)
    stream.close()
    assert method.generate(PROMPT, 40).text.startswith(first)


def test_messages_go_through_the_chat_template(target, monkeypatch):
    method = load_method("autoregressive", target)
    messages = [{"role": "user", "content": "import os"}]
    with pytest.raises(UserError, match="has no chat template; give the prompt as one text"):
        method.generate(messages, 4)
    monkeypatch.setattr(target.tokenizer, "chat_template", TEMPLATE, raising=False)
    expected = method.generate("<user>import os\n<assistant>", 12)
    assert method.generate(messages, 12).generation.tokens == expected.generation.tokens
    assert "".join(method.stream(messages, 12)) == expected.text
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"template of .* cannot render these messages \(roles must alternate\)"):
        method.generate(messages, 4)


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
