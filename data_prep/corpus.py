"""Texts to train on: where they come from, which are held out, and how they become rows of tokens.

The default corpus is the Python standard library's own sources, found through `sysconfig`, so that the main job
runs on any machine without a network. Documents are held out whole, by a hash of their id: the split is the same on
every machine and for every run, whatever the order in which files are found.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spectrain.errors import UserError

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Document:
    """One text and the name it is known by (a path or a line number), unique within its corpus."""

    id: str
    text: str


@dataclass(frozen=True)
class PackedRows:
    """Token rows of equal length: documents in hashed order, each closed by the end-of-text token, cut into rows."""

    train: Tensor  # [n_train, L] int32
    held_out: Tensor  # [n_held_out, L] int32


def stdlib_documents() -> Iterator[Document]:
    """Yields the sources of the Python standard library of this interpreter, without what pip installed beside it.

    Tables that are data rather than code (`encodings`, `pydoc_data`) and files that are not UTF-8 are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"} & set(parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            log.debug("left out, not UTF-8: %s", path)
            continue
        if text.strip():
            yield Document("/".join(parts), text)


def file_documents(path: str, fields: list[str] | None = None) -> Iterator[Document]:
    """Yields the texts of a file or of every `.py`, `.txt`, `.md` and `.jsonl` file below a folder.

    Args:
        path: a file or folder. A `.jsonl` file gives one document a line.
        fields: which string fields of a JSONL row make its text, joined by blank lines; all of them when None.

    Raises:
        UserError: nothing stands at `path`, or a JSONL line is malformed or lacks a field.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise UserError(f"corpus.path={path} does not exist; give a text file, a .jsonl file or a folder of them")
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    for file in files:
        name = file.name if root.is_file() else file.relative_to(root).as_posix()
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            log.warning("left out, not UTF-8: %s", file)
            continue
        if file.suffix == ".jsonl":
            yield from _jsonl_documents(name, text, fields)
        elif text.strip():
            yield Document(name, text)


SUFFIXES = (".py", ".txt", ".md", ".jsonl")


def _jsonl_documents(name: str, text: str, fields: list[str] | None) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines also cuts at U+2028, inside JSON strings
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{name} line {number} is not JSON ({error.msg}); mend or remove the line") from error
        keys = fields or [key for key, value in row.items() if isinstance(value, str)]
        missing = [key for key in keys if not isinstance(row.get(key), str)]
        if missing:
            raise UserError(f"{name} line {number} has no text field {missing[0]!r}; set corpus.fields to keys it has")
        body = "\n\n".join(row[key] for key in keys if row[key])
        if body.strip():
            yield Document(f"{name}:{number}", body)


def is_held_out(document_id: str, share: float) -> bool:
    """Whether a document belongs to the held-out `share` (0 to 1) of its corpus: a hash of its id decides."""
    return _unit_hash(f"held-out:{document_id}") < share


def _unit_hash(text: str) -> float:
    """A number in [0, 1) that is the same for the same text on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer whose id 0 is the end of text.

    Args:
        texts: the training documents.
        vocab_size: entries in all, the 256 bytes and the end of text included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def pack(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    row_tokens: int,
    held_out_share: float,
    max_documents: int | None = None,
) -> PackedRows:
    """Tokenises documents and packs them into rows, training and held-out documents apart.

    Args:
        documents: the corpus; ids decide the split and the order, so that both are the same everywhere.
        tokenizer: the target's tokenizer; its end-of-text token closes each document.
        row_tokens: length L of a row, in tokens.
        held_out_share: share of the documents that no training sees, 0 to 1.
        max_documents: keep only so many documents (the first in hashed order); all when None.

    Raises:
        UserError: a side of the split has too little text for one row, or the tokenizer has no end of text.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the target's tokenizer has no end-of-text token; set eos_token in its tokenizer_config.json")
    ordered = sorted(documents, key=lambda document: _unit_hash(document.id))[:max_documents]
    sides: dict[bool, list[str]] = {True: [], False: []}
    for document in ordered:
        sides[is_held_out(document.id, held_out_share)].append(document.text)
    rows = {side: _rows(texts, tokenizer, row_tokens) for side, texts in sides.items()}
    for side, name in ((False, "training"), (True, "held-out")):
        if len(rows[side]) == 0:
            raise UserError(
                f"the corpus gives no {name} row of {row_tokens} tokens ({len(sides[side])} documents); "
                "use a larger corpus, a shorter data.row_tokens or another data.held_out_share"
            )
    return PackedRows(train=rows[False], held_out=rows[True])


def _rows(texts: list[str], tokenizer: PreTrainedTokenizerBase, row_tokens: int) -> Tensor:
    ids: list[int] = []
    for start in range(0, len(texts), 256):
        batch = tokenizer(texts[start : start + 256], add_special_tokens=False, verbose=False)["input_ids"]
        for document in batch:
            ids.extend(document)
            ids.append(tokenizer.eos_token_id)
    n_rows = len(ids) // row_tokens
    return torch.tensor(ids[: n_rows * row_tokens], dtype=torch.int32).view(n_rows, row_tokens)
