"""Which tokens of a rendered conversation the assistant wrote, over templates of all kinds."""

from __future__ import annotations

import random

import pytest

from spectrain.data.chat_tokens import ChatRenderer
from spectrain.data.chats import Chat
from spectrain.data.packing import Tokeniser
from spectrain.data.texts import END_OF_TEXT, Document, train_tokenizer
from spectrain.decoding.text import chat_ids
from spectrain.errors import UserError

BEGIN, END = "<|im_start|>", "<|im_end|>"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
READY = f"{{% if add_generation_prompt %}}{BEGIN}assistant\n{{% endif %}}"
EACH, NEXT = "{% for m in messages %}", "{% endfor %}"


def turn(content: str) -> str:
    return f"{EACH}{BEGIN}{{{{ m.role }}}}\n{content}{END}\n{NEXT}{READY}"


PLAIN = turn("{{ m.content }}")
MARKED = (
    f"{EACH}{{% if m.role == 'assistant' %}}{BEGIN}assistant\n{{% generation %}}{{{{ m.content }}}}{END}"
    f"{{% endgeneration %}}{{{{ '\\n' }}}}{{% else %}}{PLAIN.removeprefix(EACH).removesuffix(NEXT + READY)}"
    f"{{{{ '' }}}}{{% endif %}}{NEXT}{READY}"
)
NO_PROMPT = EACH + "<{{ m.role }}>{{ m.content | trim }}" + END + "\n" + NEXT  # the role is written by nobody
LLAMA_2 = (
    EACH + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %} {{ m.content }} "
    f"{END}{{% else %}}{{{{ raise_exception('no such role') }}}}{{% endif %}}" + NEXT
)
SYSTEM_LAST = (  # as Mistral's: the system's text stands in the last question
    "{% set s = messages[0].content if messages[0].role == 'system' else '' %}" + EACH + "{% if m.role == 'user' %}"
    "[INST] {% if loop.index >= messages | length - 1 and s %}{{ s }}\n\n{% endif %}{{ m.content }}[/INST]"
    f"{{% elif m.role == 'assistant' %}} {{{{ m.content | trim }}}}{END}{{% endif %}}" + NEXT
)
THINKING = turn(  # as Qwen 3's: thoughts stand in the last turn alone, if need be empty ones
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
)
TOOLS = "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}" + turn("{{ m.content }}" + CALLS)
BY_LENGTH = "{{ messages | length }} turns\n" + PLAIN  # every turn changes the beginning
TEMPLATES = {
    **{"plain": PLAIN, "marked": MARKED, "no prompt": NO_PROMPT, "llama 2": LLAMA_2, "system last": SYSTEM_LAST},
    **{"thinking": THINKING, "tools": TOOLS, "by length": BY_LENGTH},
}


def message(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}]
TURNS = [message("user", "Hi"), message("assistant", "Ho! "), message("user", "Ho! Why?"), message("assistant", "Hi")]
WITH_SYSTEM = [message("system", "Be kind."), *TURNS]
CALLING = [message("user", "Warm?"), message("assistant", "", tool_calls=CALL), message("tool", "4"), *TURNS[1:2]]
THOUGHT = [*TURNS[:2], TURNS[2], message("assistant", "Hi", reasoning_content="why")]
WRITTEN = {  # by template and conversation: what is learned, and how many replies are not
    ("plain", "turns"): (["Ho! <|im_end|>", "Hi<|im_end|>"], 0),
    ("plain", "system"): (["Ho! <|im_end|>", "Hi<|im_end|>"], 0),
    ("marked", "turns"): (["Ho! <|im_end|>", "Hi<|im_end|>"], 0),
    ("no prompt", "system"): (["Ho!<|im_end|>", "Hi<|im_end|>"], 0),
    ("llama 2", "turns"): ([" Ho!  <|im_end|>", "Hi <|im_end|>"], 0),
    ("llama 2", "system"): ([" Ho!  <|im_end|>", "Hi <|im_end|>"], 0),  # with the system's text in the first question
    ("system last", "turns"): ([" Ho!<|im_end|>", "Hi<|im_end|>"], 0),
    ("system last", "system"): (["Hi<|im_end|>"], 1),
    ("thinking", "turns"): (["Hi<|im_end|>"], 1),
    ("thinking", "thought"): (["<think>\nwhy\n</think>\n\nHi<|im_end|>"], 1),
    ("tools", "calling"): (
        ['<call>{"name": "weather", "arguments": {"town": "Ulm"}}</call><|im_end|>', "Ho! <|im_end|>"],
        0,
    ),
    ("by length", "turns"): ([], 2),
}
CHATS = {"turns": TURNS, "system": WITH_SYSTEM, "calling": CALLING, "thought": THOUGHT}


@pytest.fixture(scope="module")
def tokenizer():
    made = train_tokenizer(["<user>Hi Ho! Why? <assistant>Be kind.\n" * 3], 290)
    made.add_tokens([BEGIN, END], special_tokens=True)
    return made


def rendering(tokenizer, template: str) -> ChatRenderer:
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer, (tokenizer.convert_tokens_to_ids(END),))


def stretches(tokenizer, found) -> list[str]:
    """The stretches of text that are learned."""
    texts, before = [], False
    for token, is_own in zip(found.ids.tolist(), found.is_assistant.tolist(), strict=True):
        if is_own:
            texts += [] if before else [[]]
            texts[-1].append(token)
        before = is_own
    return [tokenizer.decode(text) for text in texts]


@pytest.mark.parametrize(("template", "chat"), WRITTEN, ids=str)
def test_what_the_assistant_wrote_is_learned_and_nothing_else(tokenizer, template, chat):
    messages = CHATS[chat]
    (found,) = rendering(tokenizer, TEMPLATES[template]).tokens([Chat(messages)])
    assert (stretches(tokenizer, found), found.unseen) == WRITTEN[template, chat]
    if (template, chat) != ("llama 2", "system"):
        assert found.ids.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]


LAST_THOUGHT = (  # marks thoughts of the last turn only, apart from what is said
    f"{EACH}{BEGIN}{{{{ m.role }}}}\n{{% if m.role == 'assistant' %}}{{% if m.reasoning_content and loop.last %}}"
    "{% generation %}({{ m.reasoning_content }}){% endgeneration %} {% endif %}{% generation %}{{ m.content }}"
    f"{END}{{% endgeneration %}}{{% else %}}{{{{ m.content }}}}{END}{{% endif %}}{NEXT}{READY}"
)
ONLY_LAST = LAST_THOUGHT.replace("{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and loop.last %}")
TEMPLATES |= {"last thought": LAST_THOUGHT, "only last": ONLY_LAST}
CHATS["thoughts"] = [
    one for k in "123" for one in (message("user", "Hi"), message("assistant", "Ho" + k, reasoning_content="why" + k))
]
OFF = {  # by template, conversation and what is marked as not to be learned: what is learned, and how many are not seen
    ("plain", "turns", (0,)): (["Hi<|im_end|>"], 0),
    ("plain", "system", (0, 1)): ([], 0),
    ("marked", "turns", (1,)): (["Ho! <|im_end|>"], 0),
    ("marked", "system", (0,)): (["Hi<|im_end|>"], 0),
    ("llama 2", "system", (0,)): (["Hi <|im_end|>"], 0),
    ("thinking", "thought", (0,)): (["<think>\nwhy\n</think>\n\nHi<|im_end|>"], 1),
    ("thinking", "thought", (1,)): ([], 1),
    ("tools", "calling", (0,)): (["Ho! <|im_end|>"], 0),
    ("last thought", "thoughts", (0,)): (["Ho2<|im_end|>", "(why3) Ho3<|im_end|>"], 0),
    ("last thought", "thoughts", (1,)): (["Ho1<|im_end|>", "(why3) Ho3<|im_end|>"], 0),
    ("last thought", "thoughts", (2,)): (["Ho1<|im_end|>", "Ho2<|im_end|>"], 0),
    ("only last", "thoughts", (0,)): (["(why3) Ho3<|im_end|>"], 0),
    ("only last", "thoughts", (2,)): ([], 0),
}


@pytest.mark.parametrize(("template", "chat", "unlearned"), OFF, ids=str)
def test_a_reply_that_is_marked_stays_in_the_context_and_is_not_learned(tokenizer, template, chat, unlearned):
    renderer = rendering(tokenizer, TEMPLATES[template])
    (learned,), (found,) = renderer.tokens([Chat(CHATS[chat])]), renderer.tokens([Chat(CHATS[chat], None, unlearned)])
    assert (stretches(tokenizer, found), found.unseen) == OFF[template, chat, unlearned]
    assert found.ids.tolist() == learned.ids.tolist()


def test_thoughts_go_by_the_template_s_name(tokenizer):
    for name in ("thinking", "reasoning"):
        renderer = rendering(tokenizer, THINKING.replace("reasoning_content", name) + "{{ enable_thinking }}")
        (found,) = renderer.tokens([Chat(THOUGHT)])
        assert stretches(tokenizer, found) == WRITTEN["thinking", "thought"][0]
        assert list(renderer.remarks({"reasoning_content"})) == []
    (said,) = rendering(tokenizer, PLAIN + "{% if thinking %}{% endif %}").remarks({"reasoning_content"})
    assert said.startswith("the chat template does not write reasoning_content")


def slowly(tokenizer, messages: list[dict]) -> list[bool]:
    """The definition, turn by turn and token by token: what changes with the reply, where it stands as it was seen."""

    def text_of(messages: list[dict], **asked) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **asked)

    whole, learned = text_of(messages), set()
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    for number, one in enumerate(messages):
        if one["role"] != "assistant":
            continue
        prompt, alone = text_of(messages[:number], add_generation_prompt=True), text_of(messages[: number + 1])
        other = text_of([*messages[:number], message("assistant", "\ue000")])
        start = len(prompt)
        while start < len(alone) and alone[start] == other[start]:
            start += 1
        end, behind = len(alone), len(other)
        while end > start and alone[end - 1] == other[behind - 1]:
            end, behind = end - 1, behind - 1
        end = len(alone[:end].rstrip())
        if not (alone.startswith(prompt) and whole.startswith(alone[:end])):
            continue
        own = [k for k, (first, last) in enumerate(encoded["offset_mapping"]) if first < end and last > start]
        behind = own[-1] + 1
        while behind < len(encoded["input_ids"]) and not tokenizer.decode([encoded["input_ids"][behind]]).strip():
            behind += 1
        is_closed = behind < len(encoded["input_ids"]) and tokenizer.decode([encoded["input_ids"][behind]]) == END
        learned.update(own, range(own[-1], behind + 1) if is_closed else ())
    return [k in learned for k in range(len(encoded["input_ids"]))]


@pytest.mark.parametrize("template", [name for name in TEMPLATES if "{% generation" not in TEMPLATES[name]])
def test_masks_are_those_of_the_definition(tokenizer, template):
    renderer, draw = rendering(tokenizer, TEMPLATES[template]), random.Random(0)
    texts = ["Hi", " Ho! ", "Ho! Why?", "Be kind.\n", "[/INST] Hi", f"{BEGIN}assistant\nHo", "kind. " * 9, "4"]
    for _ in range(30):
        messages = [message("system", "Be kind.")] * (draw.random() < 0.4 and template != "llama 2")
        for _ in range(draw.randint(1, 3)):
            messages += [message("user", draw.choice(texts)), message("assistant", draw.choice(texts))]
        (found,) = renderer.tokens([Chat(messages)])
        assert found.is_assistant.tolist() == slowly(tokenizer, messages), messages


def test_marks_and_the_definition_agree(tokenizer):
    (marked,) = rendering(tokenizer, MARKED).tokens([Chat(WITH_SYSTEM)])
    tokenizer.chat_template = PLAIN
    assert marked.is_assistant.tolist() == slowly(tokenizer, WITH_SYSTEM)


def documents(*chats: Chat) -> list[Document]:
    return [Document(f"a.jsonl:{number}", "", chat) for number, chat in enumerate(chats, start=1)]


def test_what_the_template_does_to_conversations_is_said(tokenizer, caplog):
    said = {
        THINKING: "10 of 20 assistant turns are not learned",
        LLAMA_2: "the chat template refuses system turns: their text is put before the first question",
        PLAIN + "{{ strftime_now('%H') }}": "the chat template writes the time",
    }
    for template, sentence in said.items():
        tokenizer.chat_template, tokeniser = template, Tokeniser(tokenizer)
        assert len(list(tokeniser.tokens(documents(*[Chat(TURNS)] * 9, Chat(WITH_SYSTEM))))) == 10
        assert sentence in " ".join(tokeniser.remarks())
    tokenizer.chat_template, tokeniser = PLAIN, Tokeniser(tokenizer)
    list(tokeniser.tokens(documents(Chat(CALLING, CALL))))
    assert [sentence.split(":")[0] for sentence in tokeniser.remarks()[:2]] == [
        "the chat template does not write tool_calls",
        "the chat template does not write tools",
    ]


def test_few_conversations_that_a_template_refuses_are_left_out_and_many_are_a_sentence(tokenizer):
    tokenizer.chat_template = LLAMA_2
    asked = documents(*[Chat(TURNS)] * 10, Chat(CALLING))
    tokeniser = Tokeniser(tokenizer)
    assert [one.id for one in tokeniser.tokens(asked)] == [one.id for one in asked[:10]]
    (said,) = tokeniser.remarks()
    assert "a.jsonl:11 is refused: " in said
    assert "no such role" in said
    tokeniser = Tokeniser(tokenizer)
    list(tokeniser.tokens(asked[-1:]))
    with pytest.raises(UserError, match=r"a\.jsonl:11 is refused: .*\(no such role\)"):
        tokeniser.remarks()


def test_a_broken_template_is_one_sentence(tokenizer):
    tokenizer.chat_template = "{% for %}"
    with pytest.raises(UserError, match="the chat template of .* cannot render"):
        ChatRenderer(tokenizer)


def test_of_several_templates_the_default_is_used_and_tool_use_for_conversations_with_tools(tokenizer):
    templates = {"default": PLAIN, "tool_use": TOOLS}
    renderer, tools = rendering(tokenizer, templates), [{"type": "function", "function": {"name": "weather"}}]
    chats = [Chat(TURNS), Chat(CALLING, tools)]
    for chat, found in zip(chats, renderer.tokens(chats), strict=True):
        whole = tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False)
        assert tokenizer.decode(found.ids) == whole
        assert chat_ids(tokenizer, chat.messages[:1], chat.tools)[:5] == found.ids[:5].tolist()
    tokenizer.chat_template = {"a": PLAIN, "b": TOOLS}
    for read in (ChatRenderer, lambda tokenizer: chat_ids(tokenizer, TURNS[:1])):
        with pytest.raises(UserError, match="has the chat templates a, b, and none is named default; write the one"):
            read(tokenizer)


def test_without_a_template_a_conversation_is_one_text(tokenizer):
    tokenizer.chat_template, tokeniser = None, Tokeniser(tokenizer)
    (document,) = tokeniser.tokens([Document("a", "Hi\n\n Ho! ", Chat(TURNS[:2]))])
    assert tokenizer.decode(document.tokens) == "Hi\n\n Ho! "
    assert document.is_response is None
    assert "1 conversations are read as texts" in tokeniser.remarks()[0]
    assert END_OF_TEXT not in tokenizer.decode(document.tokens)
