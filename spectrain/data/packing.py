"""Documents as tokens, and how they are packed into rows of equal length.

packed = pack(read_documents("chats.jsonl"), target.tokenizer, row_tokens=1024, held_out_share=0.05)
packed.train.tokens, packed.train.is_response, packed.train.starts
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spectrain.data.chat_tokens import ChatRenderer
from spectrain.data.chats import Row, Tally
from spectrain.data.overlap import shares_any
from spectrain.data.texts import Document, is_held_out, unit_hash
from spectrain.errors import TooLittleText, UserError
from spectrain.stores.files import read_object, write_json

TOKENISED_TOGETHER = 256  # documents
READ_PER_DOCUMENT = 4  # documents among which each one of `max_documents` is chosen
WRITTEN_ROWS = 256  # at once
SIDES = ("train", "held_out")
COLUMNS = {"tokens": torch.int32, "is_response": torch.bool, "starts": torch.int32}  # of rows, a file each
FACTS = "rows.json"


@dataclass(frozen=True)
class TokenDocument:
    """A document as tokens, without the end of text that closes it in a row."""

    id: str
    tokens: np.ndarray  # [n] int32
    is_response: np.ndarray | None  # [n] bool: written by the target, or by the assistant; None: it is no answer
    held_out_by: str = ""  # the id that decides whether it is held out


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
    said: tuple[str, ...] = ()  # what the user should know of how they were made
    digest: str = ""  # of all rows

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

    `eos_ids` end a text of the target, besides the tokenizer's own. `forbidden` are hashes of runs
    (`overlap.question_runs`); documents with any of them are left out.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int] = (), forbidden: np.ndarray | None = None
    ) -> None:
        self.tokenizer, self.eos_ids, self.forbidden, self.n_forbidden = tokenizer, eos_ids, forbidden, 0
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
                    self.names.update(*document.chat.messages, (m["role"] for m in document.chat.messages))
                    self.names.update({"tools"} if document.chat.tools else ())
                if self.forbidden is not None and shares_any(ids, self.forbidden):
                    self.n_forbidden += 1
                    continue
                yield TokenDocument(document.id, np.asarray(ids, np.int32), mask, document.prompt_id or document.id)

    def remarks(self) -> list[str]:
        """Return sentences that the user should know; UserError where too many conversations were refused."""
        self.tally.check()
        said = list(self.renderer.remarks(self.names)) if self.tally.kinds else []
        if self.forbidden is not None:
            said.append(f"{self.n_forbidden} documents that share 13 tokens with the prompts are left out")
        if self.n_untemplated:
            how = f"{self.n_untemplated} conversations are read as texts, of which all is learned"
            said.append(f"the tokenizer has no chat template: {how}")
        if self.tally.n_broken:
            said.append(f"rendered by the chat template: {self.tally.say()}")
        if self.n_unseen:
            said.append(
                f"{self.n_unseen} of {self.tally.replies} assistant turns are not learned: the chat template leaves "
                "out or moves parts of earlier turns, so the model never saw or wrote them like this"
            )
        return said


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
    forbidden: np.ndarray | None = None,
    tally: Tally | None = None,
    folder: Path | None = None,
) -> Packed:
    """Tokenise documents and pack them into rows, training and held-out documents apart.

    Args:
        documents: the corpus. Their ids decide the split, so it is the same everywhere. Memory does not grow with them.
        tokenizer: of the target; its end-of-text token closes each document that does not end with it.
        row_tokens: length L of a row.
        held_out_share: of the documents, 0 to 1; no training sees these.
        max_documents: take so many, in hashed order, of the first READ_PER_DOCUMENT times as many; None: all.
        loss_on: "response": rows say which tokens are responses, where there are any. "all": they do not.
        document_mask: whether rows say where documents begin.
        vocab_size: of the target; None: not compared.
        eos_ids, forbidden: see `Tokeniser`.
        tally: of the documents, which the rows keep as a sentence.
        folder: empty, in which the rows are kept for `open_packed`; None: nowhere.

    Raises:
        UserError: a side has too little text for one row, the tokenizer has no end of text, a chat template fails, or a
            token is none of the target's.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            rest = held_out_share, max_documents, loss_on, document_mask, vocab_size, eos_ids, forbidden, tally
            return pack(documents, tokenizer, row_tokens, *rest, Path(temporary))
    if tokenizer.eos_token_id is None:
        raise UserError("the target's tokenizer has no end-of-text token; set eos_token in its tokenizer_config.json")
    if max_documents is not None:
        first = islice(documents, READ_PER_DOCUMENT * max_documents)
        documents = sorted(first, key=lambda document: unit_hash(document.id))[:max_documents]
    tokeniser = Tokeniser(tokenizer, eos_ids, forbidden)
    writers = {side: RowWriter(folder / side, tokenizer.eos_token_id, row_tokens, document_mask) for side in SIDES}
    for document in tokeniser.tokens(documents):
        if vocab_size is not None and len(document.tokens) and (most := int(document.tokens.max())) >= vocab_size:
            raise UserError(
                f"the corpus has the token {most}, but the target knows {vocab_size}; give a target whose tokenizer is "
                "its own"
            )
        side = writers[SIDES[is_held_out(document.held_out_by, held_out_share)]]
        side.add(document if loss_on == "response" else replace(document, is_response=None))
    said = ([tally.say()] if tally is not None and tally.is_remarkable else []) + tokeniser.remarks()
    for name, writer in zip(("training", "held-out"), writers.values(), strict=True):
        writer.finish()
        if not writer.n_rows:
            with_response = " with a response" if writer.has_response else ""
            raise TooLittleText(
                f"corpus too small: the {writer.n_documents} {name} documents make no {name} row of {row_tokens} tokens"
                f"{with_response}; use a larger corpus, a shorter data.row_tokens or another corpus.held_out_share"
                + "".join(f" ({sentence})" for sentence in said)
            )
    digest = hashlib.sha256("".join(writer.digest.hexdigest() for writer in writers.values()).encode()).hexdigest()
    facts = _Facts(row_tokens, [writer.n_rows for writer in writers.values()], said, digest[:16])
    write_json(folder / FACTS, facts)
    return open_packed(folder)


def open_packed(folder: Path) -> Packed:
    """Return the rows that `pack` kept in a folder, which stay on disk until they are used."""
    facts = read_object(folder / FACTS, _Facts, "remove its folder")
    both = zip(SIDES, facts.n_rows, strict=True)
    sides = (open_rows(folder / side, n_rows, facts.row_tokens) for side, n_rows in both)
    return Packed(*sides, tuple(facts.said), facts.digest)


def open_rows(folder: Path, n_rows: int, row_tokens: int) -> PackedRows:
    """Return the rows that a `RowWriter` wrote into a folder."""
    parts = {}
    for name, dtype in COLUMNS.items():
        if (folder / name).is_file():
            size = n_rows * row_tokens
            flat = torch.from_file(str(folder / name), size=size, dtype=dtype) if size else torch.empty(0, dtype=dtype)
            parts[name] = flat.view(n_rows, row_tokens)
    return PackedRows(**parts)


@dataclass(frozen=True)
class _Facts:
    row_tokens: int
    n_rows: list[int]  # of each side
    said: list[str]
    digest: str


class RowWriter:
    """Packs documents into rows, one after the other, and appends them to the files of a folder.

    The incomplete last row is dropped, and so are rows with no token to learn.
    """

    def __init__(self, folder: Path, eos_id: int, row_tokens: int, document_mask: bool) -> None:
        self.folder, self.eos_id, self.row_tokens, self.document_mask = folder, eos_id, row_tokens, document_mask
        self.n_rows = self.n_documents = 0
        self.has_response, self.digest = False, hashlib.sha256()
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # tokens, masks, where documents begin
        self._n_waiting = self._n_cut = 0  # tokens that wait, and those that were cut into rows before
        folder.mkdir()
        self._files = {name: (folder / name).open("wb") for name in COLUMNS if document_mask or name != "starts"}

    def add(self, document: TokenDocument) -> None:
        """Add a document; where its end of text was not part of a response, that is not learned."""
        tokens, mask = document.tokens, document.is_response
        self.has_response |= mask is not None
        mask = np.ones(len(tokens), bool) if mask is None else mask
        if not len(tokens) or tokens[-1] != self.eos_id:
            tokens = np.append(tokens, np.int32(self.eos_id))
            mask = np.append(mask, document.is_response is None)
        begin = self._n_cut + self._n_waiting
        self._waiting.append((tokens, mask, np.full(len(tokens), begin, np.int64)))
        self._n_waiting += len(tokens)
        self.n_documents += 1
        if self._n_waiting >= WRITTEN_ROWS * self.row_tokens:
            self._write()

    def finish(self) -> None:
        """Write the last rows. Texts alone have no mask."""
        if self._waiting:
            self._write()
        for file in self._files.values():
            file.close()
        if not self.has_response:
            (self.folder / "is_response").unlink()

    def _write(self) -> None:
        n_rows = self._n_waiting // self.row_tokens
        n_tokens = n_rows * self.row_tokens
        flat = [np.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
        tokens, masks, begins = (part[:n_tokens].reshape(n_rows, self.row_tokens) for part in flat)
        self._waiting, self._n_waiting = [tuple(part[n_tokens:] for part in flat)], self._n_waiting - n_tokens
        starts = np.maximum(begins - self._n_cut - np.arange(n_rows)[:, None] * self.row_tokens, 0).astype(np.int32)
        self._n_cut += n_tokens
        learned = masks[:, 1:] & (starts[:, 1:] == starts[:, :-1]) if self.document_mask else masks[:, 1:]
        kept = learned.any(axis=1)
        for name, rows in (("tokens", tokens), ("is_response", masks), ("starts", starts)):
            if name in self._files:
                self._files[name].write(rows[kept].tobytes())
                self.digest.update(rows[kept].tobytes())
        self.n_rows += int(kept.sum())
