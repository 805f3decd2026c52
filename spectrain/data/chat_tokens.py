"""Conversations as token ids by a target's chat template, and which of them the assistant wrote.

    renderer = ChatRenderer(target.tokenizer, target.eos_ids)
    for found in renderer.tokens([chat]):
        found.ids, found.is_assistant, found.unseen

Templates may mark what the assistant writes ({% generation %}). With any other one, each turn is compared with its
prompt: the conversation before it, rendered ready for the answer. What follows there is the assistant's, apart from
what every answer begins or ends with. Some templates change earlier turns when the conversation goes on: they leave
thoughts out, or move the system's text to the last question. A turn that was changed like that, or whose prompt was, is
not learned, because the model never saw or wrote it so. An end-of-text token behind a reply belongs to the reply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import pairwise, takewhile

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from spectrain.data.chats import Chat, Messages
from spectrain.data.known import THOUGHTS
from spectrain.decoding.text import chat_template, rendered, told
from spectrain.errors import UserError

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
CLOCK = re.compile(r"\bstrftime_now\((['\"])(.*?)\1\)")
PROBE = (("Quartz?", "Xylem."), ("Jukebox?", "Vortex!"), ("Zebra?", "Waltz"))  # questions and replies, which end unlike
SAID = ("a conversation", "mend or remove the conversation, or mend the template")  # where one is refused
MARK = "\ue000"  # a character that no reply has
STARTED = datetime.now()  # what a template that asks for the time is told, so that all of a run agrees


@dataclass(frozen=True)
class ChatTokens:
    """A conversation as tokens."""

    ids: np.ndarray  # [n] int32
    is_assistant: np.ndarray  # [n] bool
    unseen: int = 0  # turns of the assistant that are not learned, as the model never saw them so


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    replies: list[tuple[int, int]]  # what the assistant wrote, from one character to before another
    unseen: int = 0  # see `ChatTokens`


class ChatRenderer:
    """Renders conversations by a tokenizer's chat template.

    Where the template refuses system turns, their text is put before the first question.

    `eos_ids` end a text of the target; the tokenizer's own is added.

    Raises:
        UserError: the tokenizer cannot say where its tokens stand in a text, or its template is broken.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int] = ()) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path} cannot say where its tokens stand in a text, so replies "
                "cannot be told from prompts; give corpus.fields of plain texts, or a target with a fast tokenizer"
            )
        self.tokenizer, own = tokenizer, {tools: chat_template(tokenizer, tools) for tools in (False, True)}
        at_start = partial(CLOCK.sub, lambda call: repr(STARTED.strftime(call[2])))
        self._templates = {has_tools: at_start(template) for has_tools, template in own.items()}
        self._eos = list({*eos_ids, tokenizer.eos_token_id} - {None})
        self._wide = [token for token, added in tokenizer.added_tokens_decoder.items() if added.rstrip]
        self.is_marked, self.reads_clock = all(map(GENERATION.search, own.values())), self._templates != own
        asked, (replied, other) = _user(PROBE[0][0]), (_assistant(reply) for _, reply in PROBE[:2])
        prompt, *whole = self._render([asked], add_generation_prompt=True), self._render([asked, replied])
        whole += [self._render([asked, other])]
        answers = [text[len(prompt) :] for text in whole if text.startswith(prompt)]
        # What stands behind the prompt, and behind a reply, whatever the reply is.
        self._before = _shared(answers)
        self._behind = _shared([answer[::-1] for answer in answers])[::-1]
        self.takes_system = self._takes_system()
        # What stands between a plain question and its reply, where earlier turns are never rewritten; else None.
        self._between = {has_system: self._pattern(has_system) for has_system in {False, self.takes_system}}

    def tokens(self, chats: Sequence[Chat]) -> list[ChatTokens | UserError]:
        """Return conversations as tokens, in their order; UserErrors for those that the template cannot render."""
        found = [self.text(chat) for chat in chats]
        encoded = self._encoded([one for one in found if isinstance(one, Rendered)])
        return [next(encoded) if isinstance(one, Rendered) else one for one in found]

    def text(self, chat: Chat) -> Rendered | UserError:
        """Return a conversation as text, or why the template cannot render it."""
        chat = self._accepted(chat)
        try:
            return self._learned(self._marked(chat) if self.is_marked else self._compared(chat), chat)
        except UserError as error:
            return error

    def remarks(self, names: Iterable[str]) -> Iterator[str]:
        """Yield sentences on what a user should know who renders conversations with these roles and keys."""
        templates = " ".join(self._templates.values())
        for name in sorted(set(names) & {"tools", "tool_calls", THOUGHTS[0]}):
            # Thoughts of a message; a template's own variable may be called `thinking`, too.
            written = rf"[.'\"]({'|'.join(THOUGHTS)})\b" if name == THOUGHTS[0] else name
            if not re.search(written, templates):
                yield f"the chat template does not write {name}: conversations are read without them"
        if self.reads_clock:
            yield f"the chat template writes the time: these rows say {STARTED:%Y-%m-%d %H:%M}, later ones do not"
        if not self.takes_system and "system" in names:
            yield "the chat template refuses system turns: their text is put before the first question"

    def _learned(self, found: Rendered, chat: Chat) -> Rendered:
        """Return a conversation without the replies that are not to be learned."""
        if not chat.unlearned:
            return found
        owners = range(len(found.replies))  # the reply that each stretch belongs to
        if self.is_marked or found.unseen:
            others = (self._render(messages, chat.tools) for messages in _each_reply_changed(chat.messages))
            begins = [len(_shared([found.text, other])) for other in others]
            owners = [max(k for k, begin in enumerate([-1, *begins]) if begin < end) - 1 for _, end in found.replies]
        both = zip(found.replies, owners, strict=True)
        return replace(found, replies=[one for one, owner in both if owner not in chat.unlearned])

    def _marked(self, chat: Chat) -> Rendered:
        """Return what a template renders that marks what the assistant writes."""
        template, names = self._templates[chat.tools is not None], self.tokenizer.special_tokens_map
        with told(self.tokenizer, *SAID):
            texts, marked = render_jinja_template([chat.messages], chat.tools, None, template, True, **names)
        return Rendered(texts[0], marked[0])

    def _compared(self, chat: Chat) -> Rendered:
        """Find what the assistant wrote by what stands around it: plain replies at once, others turn by turn."""
        whole = self._render(chat.messages, chat.tools)
        between = None if chat.tools else self._between.get(chat.messages[0]["role"] == "system")
        replies = None if between is None else _plain_replies(whole, chat.messages, between)
        return self._turn_by_turn(whole, chat) if replies is None else Rendered(whole, replies)

    def _turn_by_turn(self, whole: str, chat: Chat) -> Rendered:
        """Compare what stands in the whole conversation with the prompt of each turn and its answer."""
        replies, unseen = [], 0
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(chat.messages[:number], chat.tools, add_generation_prompt=True)
            answered = self._render(chat.messages[: number + 1], chat.tools)
            own = answered[len(prompt) :].removesuffix(self._behind).rstrip()
            start = len(prompt) + (len(self._before) if own.startswith(self._before) else 0)
            end = len(prompt) + len(own)
            if answered.startswith(prompt) and start < end and whole.startswith(prompt + own):
                replies.append((start, end))
            else:
                unseen += 1
        return Rendered(whole, replies, unseen)

    def _encoded(self, texts: Sequence[Rendered]) -> Iterator[ChatTokens]:
        asked = {"add_special_tokens": False, "verbose": False, "return_attention_mask": False}
        found = self.tokenizer([one.text for one in texts], **asked) if texts else None
        for number, one in enumerate(texts):
            encoding = found.encodings[number]
            ids, offsets = np.asarray(encoding.ids, np.int32), np.asarray(encoding.offsets).reshape(-1, 2)
            is_assistant, is_wide, is_eos = np.zeros(len(ids), bool), np.isin(ids, self._wide), np.isin(ids, self._eos)
            for start, end in one.replies:
                # Several tokens may hold one character. The token of a header may hold the white space behind it.
                is_own = (offsets[:, 0] < end) & (offsets[:, 1] > start) & ~(is_wide & (offsets[:, 0] < start))
                if is_own.any():
                    first, last = np.flatnonzero(is_own)[[0, -1]]
                    behind = last + np.flatnonzero(is_eos[last:])[:1]
                    if len(behind) and not one.text[max(end, offsets[last, 1]) : offsets[behind[0], 0]].strip():
                        last = behind[0]
                    is_assistant[first : last + 1] = True
            yield ChatTokens(ids, is_assistant, one.unseen)

    def _accepted(self, chat: Chat) -> Chat:
        """Return a conversation as the template takes it: without system turns, with thoughts under all their names."""
        thoughts = (dict.fromkeys(THOUGHTS, one[THOUGHTS[0]]) if THOUGHTS[0] in one else {} for one in chat.messages)
        chat = replace(chat, messages=[more | one for more, one in zip(thoughts, chat.messages, strict=True)])
        first, *others = chat.messages
        if self.takes_system or first["role"] != "system" or not others or others[0]["role"] != "user":
            return chat
        asked = {**others[0], "content": f"{first['content']}\n\n{others[0]['content']}"}
        return replace(chat, messages=[asked, *others[1:]])

    def _takes_system(self) -> bool:
        try:
            return bool(self._render([{"role": "system", "content": "Be kind."}, *_probe()]))
        except UserError:
            return False

    def _pattern(self, has_system: bool) -> str | None:
        chat = Chat([*([{"role": "system", "content": "Be kind."}] if has_system else []), *_probe()])
        try:
            whole = self._render(chat.messages)
            found = self._turn_by_turn(whole, chat)
        except UserError:
            return None
        if len(found.replies) < len(PROBE):
            return None
        ends = [whole.index(question) + len(question) for question, _ in PROBE]
        between = {whole[end:start] for end, (start, _) in zip(ends, found.replies, strict=True)}
        return between.pop() if len(between) == 1 else None

    def _render(self, messages: Messages, tools: list[dict] | None = None, **asked: object) -> str:
        asked = {"tokenize": False, "tools": tools, "chat_template": self._templates[tools is not None], **asked}
        return rendered(self.tokenizer, messages, *SAID, **asked)


def _plain_replies(whole: str, messages: Messages, between: str) -> list[tuple[int, int]] | None:
    """Return where replies stand, found by what stands between a question and its reply.

    None: there is more than texts of a system, a user and an assistant, or the template changed them.
    """
    replies, cursor = [], 0
    for asked, reply in pairwise(messages):
        if reply["role"] == "user" and asked["role"] in ("system", "assistant"):
            continue
        if (asked["role"], reply["role"]) != ("user", "assistant") or reply.keys() != {"role", "content"}:
            return None
        places = ((text, whole.find(text + between, cursor)) for text in (asked["content"], asked["content"].strip()))
        text, place = next(((text, place) for text, place in places if place >= 0), ("", None))
        own = reply["content"].strip()
        if place is None:
            return None
        start = place + len(text) + len(between)
        begin = start
        while whole[begin : begin + 1].isspace():
            begin += 1
        if not whole.startswith(own, begin):
            return None
        cursor = begin + len(own)
        replies.append((start, cursor))
    return replies


def _each_reply_changed(messages: Messages) -> Iterator[Messages]:
    """Yield the conversation once for each reply, with a mark in front of the texts and calls of that reply."""
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            texts = {key: MARK + message[key] for key in ("content", *THOUGHTS) if message.get(key)}
            calls = [
                one["function"] | {"name": MARK + one["function"]["name"]} for one in message.get("tool_calls", ())
            ]
            changed = message | (texts or {"content": MARK})
            changed |= {"tool_calls": [{"type": "function", "function": one} for one in calls]} if calls else {}
            yield [*messages[:number], changed, *messages[number + 1 :]]


def _shared(texts: Sequence[str]) -> str:
    """Return the beginning that all texts share."""
    columns = zip(*texts, strict=False)
    return "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, columns))


def _probe() -> Messages:
    return [turn for question, reply in PROBE for turn in (_user(question), _assistant(reply))]


def _user(text: str) -> dict:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}
