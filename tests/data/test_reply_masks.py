"""Replies in many scripts, by tokenizers of all kinds: each token that holds a character of a reply is learned.

The expected masks come from the pieces that a conversation is put together from here, not from its template.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from spectrain.data.chat_tokens import ChatRenderer
from spectrain.data.chats import Chat

SCRIPTS = (
    *("The end is near", "Příliš žluťoučký kůň", "Καλημέρα κόσμε", "Привет мир", "שלום עולם", "مرحبا بالعالم"),
    *("नमस्ते दुनिया", "ওহে বিশ্ব", "வணக்கம் உலகம்", "สวัสดีชาวโลก", "გამარჯობა", "Բարեւ աշխարհ", "你好，世界。"),
    *("こんにちは世界", "안녕하세요 세계", "ሰላም ለዓለም"),
)
BORDERS = (  # what replies begin and end with
    *(
        "",
        "",
        "\n",
        " ",
        "\n\n  ",
        "\t",
        "\u00a0",
        "\u3000",
        "\u200b",
        "`",
        '"',
        ".",
        "?!",
        "€",
        "½",
        "ﬁ",
        "İ",
        "ß",
        "字",
    ),
    *("e\u0301", "a\u0323\u0302", "ů", "👩‍👩‍👧", "🏳️‍🌈", "👍🏽", "🇨🇿", "1️⃣", "😀", "𝔘", "\U0002070e", "\u202e", "\ufeff"),
)
END, WIDE = "<|end|>", "<|wide|>"  # the second one takes the white space behind it
THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
SHAPES = {  # what stands before a question, before a reply, and behind it; what ends the text then; what follows
    "special": ("<|user|>\n", "<|bot|>\n", "", END, "\n"),
    "words": ("User: ", "Bot: ", "", END, "\n"),
    "end on the next line": ("<|user|>\n", "<|bot|>\n", "\n", END, "\n"),
    "no end": ("Q: ", "A: ", "", "", "\n\n"),
    "wide header": ("<|user|>", WIDE, "", END, ""),
    "marked without its end": ("<|user|>\n", "<|bot|>\n", "", END, "\n"),
    "thoughts and calls": ("<|user|>\n", "<|bot|>\n", "", END, "\n"),
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LEVEL = pre_tokenizers.ByteLevel.alphabet()


def byte_level(normalizer: normalizers.Normalizer | None = None, prefix: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer or normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(SCRIPTS * 2, trainers.BpeTrainer(vocab_size=400, initial_alphabet=LEVEL))
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Llama 2's: half of the scripts have no characters of their own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(SCRIPTS[::2] * 2, trainers.BpeTrainer(vocab_size=600, special_tokens=BYTES))
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    fallback = Tokenizer(models.BPE(model["vocab"], merges, byte_fallback=True, fuse_unk=True))
    fallback.normalizer = tokenizer.normalizer
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fallback.decoder = decoders.Sequence(pieces)
    return fallback


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator([*SCRIPTS[::2] * 2, "User: Bot: Q: A: <think> </think> <call> </call>"], trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """Like BERT's: lower case, without accents, words of unknown characters are one token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator([*SCRIPTS[::2] * 2, "User : Bot : Q : A : < think / call >"], trainer)
    return tokenizer


KINDS = {
    "byte level": byte_level,
    "prefix space": lambda: byte_level(prefix=True),
    "other lengths": lambda: byte_level(normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])),
    "byte fallback": byte_fallback,
    "unigram": unigram,
    "word pieces": word_piece,
}


def template(shape: str) -> str:
    asked, ready, *behind = (part.replace("\n", "{{ '\\n' }}") for part in SHAPES[shape])
    content = THOUGHT + "{{ m.content }}" + CALLS
    content = f"{{% generation %}}{content}{{% endgeneration %}}" if shape.startswith("marked") else content
    reply = ready + content + "".join(behind)
    turn = f"{{% if m.role == 'user' %}}{asked}{{{{ m.content }}}}{{{{ '\\n' }}}}{{% else %}}{reply}{{% endif %}}"
    return f"{{% for m in messages %}}{turn}{{% endfor %}}{{% if add_generation_prompt %}}{ready}{{% endif %}}"


def conversation(shape: str, draw: random.Random) -> tuple[list[dict], list[tuple[str, bool]]]:
    """Messages, and the pieces of their text with whether the assistant wrote them."""
    (asked, ready, *behind), messages, pieces = SHAPES[shape], [], []

    def text() -> str:
        return draw.choice(BORDERS) + " ".join(draw.sample(SCRIPTS, draw.randint(1, 2))) + draw.choice(BORDERS)

    for _ in range(draw.randint(2, 4)):
        question, reply, more, own = text(), text(), {}, ["", ""]
        if shape == "thoughts and calls":
            call = {"name": draw.choice(SCRIPTS), "arguments": {text(): text()}}
            more = {"reasoning_content": text(), "tool_calls": [{"type": "function", "function": call}]}
            own = [
                f"<think>{more['reasoning_content']}</think>",
                f"<call>{json.dumps(call, ensure_ascii=False)}</call>",
            ]
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply, **more}]
        written = own[0] + reply + own[1]
        bare = written.rstrip()
        pieces += [(f"{asked}{question}\n", False), (ready, False), (bare, True)]
        pieces += [(written[len(bare) :] + behind[0], bool(behind[1])), (behind[1], True), (behind[2], False)]
    return messages, pieces


def expected(kind: str, tokenizer: PreTrainedTokenizerFast, pieces: list[tuple[str, bool]]) -> Iterator[bool]:
    """Whether each token holds a character that the assistant wrote."""
    whole = "".join(text for text, _ in pieces)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    names, places = tokenizer.convert_ids_to_tokens(encoded["input_ids"]), encoded["offset_mapping"]
    own = [is_own for text, is_own in pieces for _ in text]
    if kind == "byte level":  # by the bytes of each token, whatever the tokenizer says of its places
        own = [is_own for text, is_own in pieces for _ in text.encode()]
        ends = [sum(map(len, names[: k + 1])) for k in range(len(names))]
        assert WIDE in names or ends[-1] == len(own)
        places = places if WIDE in names else list(zip([0, *ends], ends, strict=False))
        own = [is_own for text, is_own in pieces for _ in text] if WIDE in names else own
    for name, (first, last) in zip(names, places, strict=True):
        yield name != WIDE and any(own[first:last])


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_that_holds_a_character_of_a_reply_is_learned(kind):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), eos_token=END)
    tokenizer.add_tokens(["<|user|>", "<|bot|>", AddedToken(WIDE, rstrip=True)], special_tokens=True)
    draw, n_replies = random.Random(kind), 0
    for shape in SHAPES:
        tokenizer.chat_template = template(shape)
        renderer = ChatRenderer(tokenizer)
        chats = [conversation(shape, draw) for _ in range(50)]
        for (messages, pieces), found in zip(chats, renderer.tokens([Chat(m) for m, _ in chats]), strict=True):
            assert found.ids.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]
            assert found.is_assistant.tolist() == list(expected(kind, tokenizer, pieces)), (shape, messages)
            n_replies += len(messages) // 2
    assert n_replies > 900
