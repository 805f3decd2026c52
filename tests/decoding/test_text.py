"""Text in, text out: `method.generate` and `method.stream`."""

import pytest

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


def test_a_character_is_held_back_until_all_its_bytes_are_there(target):
    ids = target.tokenizer("x = '\u20ac\U0001f600'")["input_ids"]
    pieces = Pieces(target.tokenizer)
    texts = [pieces.add(token) for token in ids]
    assert "".join(texts) == "x = '\u20ac\U0001f600'"
    assert not any("\ufffd" in text for text in texts)
