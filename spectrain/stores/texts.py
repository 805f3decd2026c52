"""Texts to train on: where they come from, which are held out, and how they become rows of tokens.

The default corpus is the Python standard library's own sources, found through `sysconfig`, so that the main job
runs on any machine without a network. Documents are held out whole, by a hash of their id: the split is the same on
every machine and for every run, whatever the order in which files are found.
"""

from __future__ import annotations

import codecs
import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spectrain.decoding.errors import UserError
from spectrain.stores.tables import (
    hub_texts,
    is_saved,
    jsonl_texts,
    looks_like_hub_id,
    parquet_bytes,
    parquet_texts,
    saved_texts,
)

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
PROSE = (".txt", ".md", ".rst", ".tex")
CODE = (
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala"),
    *(".js", ".jsx", ".ts", ".tsx", ".cs", ".swift", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".sh"),
    *(".sql", ".proto", ".html", ".css"),
)
SUFFIXES = (*PROSE, *CODE, ".jsonl", ".parquet")
STDLIB_HELD_OUT = 0.05  # share of the library's modules that no training sees, as conf/corpus/stdlib.yaml


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


@dataclass
class Skipped:
    """What a corpus holds besides documents."""

    not_utf8: list[str] = field(default_factory=list)  # names of files
    empty: int = 0  # documents without text
    quiet: bool = False  # True: files are not named in the log


def read_documents(
    path: str | None,
    fields: list[str] | None = None,
    split: str = "train",
    subset: str | None = None,
    skipped: Skipped | None = None,
) -> Iterator[Document]:
    """The corpus of a config: the standard library without a path, a file or folder, or a dataset of the hub.

    Args:
        path: see `file_documents`; otherwise a Hugging Face dataset's id, which is streamed.
        fields: which fields of a row make its text, joined by blank lines; all that are strings when None.
        split: of a dataset.
        subset: of a dataset of the hub.
        skipped: counts what is left out.

    Raises:
        UserError: there is no such corpus, or a row of it is malformed or lacks a field.
    """
    skipped = Skipped() if skipped is None else skipped
    if path is None:
        yield from stdlib_documents(skipped)
    elif is_remote(path):
        log.info("streaming %s from the Hugging Face hub", path)
        yield from _numbered(f"{subset or ''}:{split}".lstrip(":"), hub_texts(path, subset, split, fields), skipped)
    else:
        yield from file_documents(path, fields, split, skipped)


def is_remote(path: str | None) -> bool:
    """Whether a corpus is a dataset of the hub: nothing stands at its path, and it looks like an id."""
    return bool(path) and not _exists(path) and looks_like_hub_id(path) and not _is_source(path)


def _exists(path: str | Path) -> bool:
    return os.path.exists(Path(path).expanduser())  # Path.exists raises where a folder above may not be looked into


def _is_source(path: str) -> bool:
    return Path(path).suffix in SUFFIXES


def _name(path: Path) -> str:
    """The path as text; bytes of it that are no UTF-8 as \\xff, so that any name can be hashed and written."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises UserError where something of the corpus cannot be read, which must not go missing unnoticed."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be read ({error.strerror or error}); make it readable, or take it out of "
            "the corpus"
        ) from error


def stdlib_documents(skipped: Skipped | None = None) -> Iterator[Document]:
    """Yields the sources of the Python standard library of this interpreter, without what pip installed beside it.

    Tables that are data rather than code (`encodings`, `pydoc_data`) and files that are not UTF-8 are left out.
    """
    skipped = Skipped() if skipped is None else skipped
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _stdlib_files():
        name = _name(path.relative_to(root))
        try:
            with _reading(path):
                text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            log.debug("left out, not UTF-8: %s", path)
            skipped.not_utf8.append(name)
            continue
        yield from _unless_empty(Document(name, text), skipped)


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    no_code = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
    return [path for path in sorted(root.rglob("*.py")) if not no_code & set(path.relative_to(root).parts)]


def file_documents(
    path: str, fields: list[str] | None = None, split: str = "train", skipped: Skipped | None = None
) -> Iterator[Document]:
    """Yields the texts of a file, of every file below a folder that `SUFFIXES` names, or of a saved dataset.

    Args:
        path: a file or folder. A `.jsonl` file gives one document a line, a `.parquet` file and a folder that
            `datasets.save_to_disk` wrote one a row.
        fields: which fields of a row make its text, joined by blank lines; all that are strings when None.
        split: of a saved dataset.
        skipped: counts what is left out.

    Raises:
        UserError: nothing stands at `path`, a file cannot be read, or a row is malformed or lacks a field.
    """
    root = Path(path).expanduser()
    skipped = Skipped() if skipped is None else skipped
    if not _exists(root):
        raise UserError(f"corpus.path={path} does not exist; give a text file, a .jsonl file or a folder of them")
    if root.is_dir() and is_saved(root):
        yield from _numbered("row", saved_texts(root, split, fields), skipped)
        return
    for file in _files(root):
        with _reading(file):
            name = _name(file.relative_to(file.parent if root.is_file() else root))
            yield from _documents_of(file, name, fields, skipped)


def _documents_of(file: Path, name: str, fields: list[str] | None, skipped: Skipped) -> Iterator[Document]:
    if file.suffix == ".parquet":
        yield from _numbered(name, parquet_texts(file, name, fields), skipped)
    elif not _is_utf8(file):
        log.log(logging.DEBUG if skipped.quiet else logging.WARNING, "left out, not UTF-8: %s", _name(file))
        skipped.not_utf8.append(name)
    elif file.suffix == ".jsonl":
        yield from _numbered(name, jsonl_texts(file, name, fields), skipped)
    else:
        yield from _unless_empty(Document(name, file.read_text(encoding="utf-8")), skipped)


def _files(root: Path) -> list[Path]:
    """The files of a corpus, what lies in hidden folders (version control, environments) left out."""
    if root.is_file():
        return [root]
    with _reading(root):
        found = [path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts[:-1]))


def _is_utf8(file: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with file.open("rb") as content:
            while block := content.read(2**20):
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _numbered(name: str, rows: Iterable[tuple[int, str]], skipped: Skipped) -> Iterator[Document]:
    for number, text in rows:
        yield from _unless_empty(Document(f"{name}:{number}", text), skipped)


def _unless_empty(document: Document, skipped: Skipped) -> Iterator[Document]:
    if document.text.strip():
        yield document
    else:
        skipped.empty += 1


def corpus_bytes(path: str | None) -> int | None:
    """About how many bytes of text a corpus has, or None where that is not known before it is read."""
    if is_remote(path):
        return None
    if path is None:
        return sum(file.stat().st_size for file in _stdlib_files())
    root = Path(path).expanduser()
    if root.is_dir() and is_saved(root):
        return sum(file.stat().st_size for file in root.rglob("*.arrow"))
    files = _files(root) if _exists(root) else []
    return sum(parquet_bytes(file) if file.suffix == ".parquet" else file.stat().st_size for file in files)


def is_held_out(document_id: str, share: float) -> bool:
    """Whether a document belongs to the held-out `share` (0 to 1) of its corpus: a hash of its id decides."""
    return unit_hash(f"held-out:{document_id}") < share


def unit_hash(text: str) -> float:
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
    ordered = sorted(documents, key=lambda document: unit_hash(document.id))[:max_documents]
    sides: dict[bool, list[str]] = {True: [], False: []}
    for document in ordered:
        sides[is_held_out(document.id, held_out_share)].append(document.text)
    rows = {side: rows_of(texts, tokenizer, row_tokens) for side, texts in sides.items()}
    for side, name in ((False, "training"), (True, "held-out")):
        if len(rows[side]) == 0:
            raise UserError(
                f"the corpus gives no {name} row of {row_tokens} tokens ({len(sides[side])} documents); "
                "use a larger corpus, a shorter data.row_tokens or another data.held_out_share"
            )
    return PackedRows(train=rows[False], held_out=rows[True])


def rows_of(texts: list[str], tokenizer: PreTrainedTokenizerBase, row_tokens: int) -> Tensor:
    """Texts in their order, each closed by the end-of-text token, as rows [n, row_tokens] int32; the rest is left."""
    ids: list[int] = []
    for start in range(0, len(texts), 256):
        batch = tokenizer(texts[start : start + 256], add_special_tokens=False, verbose=False)["input_ids"]
        for document in batch:
            ids.extend(document)
            ids.append(tokenizer.eos_token_id)
    n_rows = len(ids) // row_tokens
    return torch.tensor(ids[: n_rows * row_tokens], dtype=torch.int32).view(n_rows, row_tokens)
