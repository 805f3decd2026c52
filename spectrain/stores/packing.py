"""Documents as tokens, and how they are packed into rows of equal length.

packed = pack(read_documents("chats.jsonl"), target.tokenizer, row_tokens=1024, held_out_share=0.05)
packed.train.tokens, packed.train.is_response, packed.train.starts
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spectrain.errors import UserError
from spectrain.stores.chat_tokens import ChatRenderer
from spectrain.stores.chats import Row, Tally
from spectrain.stores.texts import Document, unit_hash

log = logging.getLogger(__name__)

TOKENISED_TOGETHER = 256  # documents


@dataclass(frozen=True)
class TokenDocument:
    """A document as tokens, without the end of text that closes it in a row."""

    id: str
    tokens: np.ndarray  # [n] int32
    is_response: np.ndarray | None  # [n] bool: written by the target, or by the assistant; None: it is no answer


@dataclass(frozen=True)
class PackedRows:
    """Token rows of equal length: documents one after the other, each closed by the end of text, cut into rows."""

    tokens: Tensor  # [rows, L] int32
    is_response: Tensor | None = None  # [rows, L] bool, tokens that are learned; None: all are
    starts: Tensor | None = None  # [rows, L] int32, where in the row each token's document begins; None: not known

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, kept: slice | Tensor) -> PackedRows:
        return PackedRows(
            **{name: None if all_rows is None else all_rows[kept] for name, all_rows in vars(self).items()}
        )


@dataclass(frozen=True)
class Packed:
    """Training and held-out rows. A document is in one of them as a whole."""

    train: PackedRows
    held_out: PackedRows

    def all_rows(self) -> PackedRows:
        """Return the training rows and behind them the held-out ones.

        Where only one side holds responses, all tokens of the other are learned.
        """
        sides, masks = (self.train, self.held_out), None
        if any(side.is_response is not None for side in sides):
            all_learned = [torch.ones_like(side.tokens, dtype=torch.bool) for side in sides]
            masks = [all_learned[i] if side.is_response is None else side.is_response for i, side in enumerate(sides)]
        return PackedRows(
            torch.cat([side.tokens for side in sides]),
            None if masks is None else torch.cat(masks),
            None if self.train.starts is None else torch.cat([side.starts for side in sides]),
        )


class Tokeniser:
    """Makes tokens of documents: responses as they are, conversations by the chat template, texts tokenized.

    Without a chat template a conversation is one text, its turns joined by blank lines.

    Args:
        tokenizer: of the target.
        eos_ids: tokens that end a text of the target, besides the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int] = ()) -> None:
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        self.tally, self.n_untemplated, self.n_unseen, self.names = Tally(), 0, 0, set()

    @cached_property
    def renderer(self) -> ChatRenderer:
        """Of conversations; UserError where the template is broken."""
        return ChatRenderer(self.tokenizer, self.eos_ids)

    def tokens(self, documents: Iterable[Document]) -> Iterator[TokenDocument]:
        """Yield documents as tokens, without the conversations that the template cannot render.

        Raises:
            UserError: these are too many.
        """
        remaining, has_template = iter(documents), self.tokenizer.chat_template is not None
        while group := list(islice(remaining, TOKENISED_TOGETHER)):
            chats = [d.chat for d in group if d.chat is not None and has_template]
            texts = [d.text for d in group if d.tokens is None and not (d.chat is not None and has_template)]
            encoded = iter(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else [])
            of_chats = iter(self.renderer.tokens(chats) if chats else [])
            for document in group:
                mask = None
                if document.tokens is not None:
                    ids, mask = document.tokens, np.arange(len(document.tokens)) >= document.n_prompt
                elif document.chat is None or not has_template:
                    ids = next(encoded)
                    self.n_untemplated += document.chat is not None
                elif isinstance(chat := next(of_chats), UserError):
                    self.tally.refuse(document.id, f"is refused: {chat}")
                    continue
                else:
                    ids, mask = chat.ids, chat.is_assistant
                    self.tally.take(Row("conversations", document.chat))
                    self.n_unseen += chat.unseen
                    self.names.update(*document.chat.messages, {"tools"} if document.chat.tools else ())
                yield TokenDocument(document.id, np.asarray(ids, np.int32), mask)

    def finish(self) -> None:
        """Log what the user should know; UserError where too many conversations were refused."""
        self.tally.check()
        if self.n_untemplated:
            log.warning("the tokenizer has no chat template: %d conversations are read as texts", self.n_untemplated)
        if self.tally.n_broken:
            log.warning("rendered by the chat template: %s", self.tally.say())
        if self.n_unseen:
            log.warning(
                "%d of %d assistant turns are not learned: in the whole conversation the chat template writes them, or "
                "what is before them, otherwise than the model saw and wrote it",
                *(self.n_unseen, self.tally.replies),
            )
        if self.tally.kinds:
            for sentence in self.renderer.remarks(self.names):
                log.warning(sentence)


def pack(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    row_tokens: int,
    held_out_share: float,
    max_documents: int | None = None,
    loss_on: str = "response",
    document_mask: bool = False,
    vocab_size: int | None = None,
    eos_ids: Sequence[int] = (),
) -> Packed:
    """Tokenise documents and pack them into rows, training and held-out documents apart.

    Args:
        documents: the corpus. Their ids decide the split and the order, so both are the same everywhere.
        tokenizer: of the target; its end-of-text token closes each document that does not end with it.
        row_tokens: length L of a row.
        held_out_share: of the documents, 0 to 1; no training sees these.
        max_documents: keep only the first so many documents in hashed order; None: all.
        loss_on: "response": rows say which tokens are responses, where there are any. "all": they do not.
        document_mask: whether rows say where documents begin.
        vocab_size: of the target; None: not compared.
        eos_ids: see `Tokeniser`.

    Raises:
        UserError: a side has too little text for one row, the tokenizer has no end of text, a chat template fails, or a
            token is none of the target's.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the target's tokenizer has no end-of-text token; set eos_token in its tokenizer_config.json")
    ordered = sorted(documents, key=lambda document: unit_hash(document.id))[:max_documents]
    held_out = {document.id for document in ordered if document.is_held_out(held_out_share)}
    sides: dict[bool, list[TokenDocument]] = {False: [], True: []}
    tokeniser = Tokeniser(tokenizer, eos_ids)
    for document in tokeniser.tokens(ordered):
        side = sides[document.id in held_out]
        side.append(document if loss_on == "response" else replace(document, is_response=None))
    tokeniser.finish()
    rows = {}
    for side, name in {False: "training", True: "held-out"}.items():
        rows[side] = rows_of(sides[side], tokenizer.eos_token_id, row_tokens, document_mask)
        if not len(rows[side]):
            with_response = "" if rows[side].is_response is None else " with a response"
            raise UserError(
                f"corpus too small: the {len(sides[side])} {name} documents make no {name} row of {row_tokens} tokens"
                f"{with_response}; use a larger corpus, a shorter data.row_tokens or another corpus.held_out_share"
            )
        if vocab_size is not None and (most := int(rows[side].tokens.max())) >= vocab_size:
            raise UserError(
                f"the corpus has the token {most}, but the target knows {vocab_size}; give a target whose tokenizer is "
                "its own"
            )
    return Packed(train=rows[False], held_out=rows[True])


def rows_of(
    documents: Sequence[TokenDocument], eos_id: int, row_tokens: int, document_mask: bool = False
) -> PackedRows:
    """Pack documents in their order into rows; see `pack`.

    The incomplete last row is dropped, and so are rows with no token of a response to learn where documents have some.
    """
    closed = [_closed(document, eos_id) for document in documents]
    lengths = np.array([len(document.tokens) for document in closed], np.int64)
    n_rows = int(lengths.sum()) // row_tokens

    def cut(values: Sequence[np.ndarray], dtype: type) -> Tensor:
        flat = np.concatenate([np.zeros(0, dtype), *values])[: n_rows * row_tokens]
        return torch.from_numpy(flat.reshape(n_rows, row_tokens))

    rows = PackedRows(cut([document.tokens for document in closed], np.int32))
    if document_mask:
        begins = cut([np.repeat(np.cumsum(lengths) - lengths, lengths)], np.int64)  # in the text of all rows
        first = torch.arange(n_rows)[:, None] * row_tokens
        rows = replace(rows, starts=(begins - first).clamp_min(0).int())
    if all(document.is_response is None for document in closed):
        return rows
    masks = [np.ones(len(d.tokens), bool) if d.is_response is None else d.is_response for d in closed]
    rows = replace(rows, is_response=cut(masks, bool))
    learned = rows.is_response[:, 1:]
    if rows.starts is not None:
        learned = learned & (rows.starts[:, 1:] == rows.starts[:, :-1])
    return rows[learned.any(dim=1)]


def _closed(document: TokenDocument, eos_id: int) -> TokenDocument:
    """Return a document that ends with the end of text; where it was not part of a response, it is not learned."""
    if len(document.tokens) and document.tokens[-1] == eos_id:
        return document
    tokens, is_response = np.append(document.tokens, np.int32(eos_id)), document.is_response
    return replace(document, tokens=tokens, is_response=None if is_response is None else np.append(is_response, False))
