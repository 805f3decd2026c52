"""Texts to train on: where they come from, and which are held out. How they become rows of tokens is in `packing`.

The default corpus is the sources of the Python standard library, so that the main commands run without a network.
Documents are held out whole, by a hash of their id: the split is the same on every machine and in every run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spectrain.decoding import tokenizer_fingerprint
from spectrain.errors import UserError
from spectrain.stores.conversations import Messages, has_assistant, plain_text
from spectrain.stores.tables import Content, hub_texts, is_saved, jsonl_texts, parquet_texts, saved_texts

if TYPE_CHECKING:
    from spectrain.stores.rows import ResponseStore

log = logging.getLogger(__name__)

OF_RESPONSES = "responses:"
END_OF_TEXT = "<|endoftext|>"
SUFFIXES = (
    *(".txt", ".md", ".rst", ".tex", ".jsonl", ".parquet"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala"),
    *(".js", ".jsx", ".ts", ".tsx", ".cs", ".swift", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".sh"),
    *(".sql", ".proto", ".html", ".css"),
)
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")  # name or owner/name
NO_CODE = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}  # installed packages, tables
LATER_TURN = re.compile(r" turn \d+$")  # see `turn_id`
STDLIB_HELD_OUT = 0.05  # share of the library's modules that no training sees


@dataclass(frozen=True)
class Document:
    """One text, conversation, or prompt with its response. Its id (a path or a line number) is unique in its corpus."""

    id: str
    text: str  # of a conversation its turns; of a response empty
    messages: Messages | None = None  # of a conversation
    tokens: np.ndarray | None = None  # [n] int32: a prompt and its response, as the target read and wrote them
    n_prompt: int = 0  # tokens of the prompt
    prompt_id: str | None = None  # all draws of a prompt are held out, or none

    def is_held_out(self, share: float) -> bool:
        """Return whether the document belongs to the held-out `share` (0 to 1) of its corpus."""
        return is_held_out(self.prompt_id or self.id, share)

    def content(self) -> bytes:
        """Return what is equal for equal documents."""
        if self.tokens is not None:
            return self.tokens.tobytes()
        return (self.text if self.messages is None else json.dumps(self.messages)).encode()


@dataclass
class Skipped:
    """What reading a corpus left out."""

    not_utf8: list[str] = field(default_factory=list)  # names of files
    empty: int = 0  # documents without text
    without_assistant: int = 0  # conversations in which the assistant says nothing

    def say(self) -> None:
        """Log what is not named while reading."""
        if self.without_assistant:
            log.warning("left out, without an assistant turn: %d conversations", self.without_assistant)


def read_documents(
    path: str | None,
    fields: str | list[str] | None = None,
    split: str = "train",
    subset: str | None = None,
    skipped: Skipped | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Iterator[Document]:
    """Yield the documents of a corpus.

    Args:
        path: a file; a folder, of which every file that `SUFFIXES` names is read; a folder that
            `datasets.save_to_disk` wrote; `responses:` with a store of data_prep.responses after it, or several with
            colons between them; otherwise the id of a Hugging Face dataset, which is streamed. A `.jsonl` file gives
            one document per line; a `.parquet` file, a dataset and a store give one per row. None: the sources of this
            interpreter's standard library, without installed packages and modules of data (`encodings`).
        fields: of a row that make its text, joined by blank lines. None: the conversation in a column of
            `conversations.COLUMNS`, else all fields that are strings.
        split: of a dataset.
        subset: of a dataset on the hub.
        skipped: counts what is left out.
        tokenizer: of the target, whose ids a store of responses must hold.

    Raises:
        UserError: there is no such corpus, a file cannot be read, or a row is malformed or lacks a field.
    """
    skipped = Skipped() if skipped is None else skipped
    fields = [fields] if isinstance(fields, str) else fields
    if path is not None and path.startswith(OF_RESPONSES):
        yield from _responses(path, tokenizer)
        return
    try:
        for name, contents in _sources(path, fields, split, subset, skipped):
            for number, content in contents:
                document = _document(name if number is None else f"{name}:{number}", content)
                if document.messages is not None and not has_assistant(document.messages):
                    skipped.without_assistant += 1
                elif document.text.strip():
                    yield document
                else:
                    skipped.empty += 1
        skipped.say()
    except OSError as error:  # no file may go missing unnoticed
        reason = error.strerror or error
        raise UserError(f"{error.filename or path} cannot be read ({reason}); make it readable or remove it") from error


def _document(name: str, content: Content) -> Document:
    is_text = isinstance(content, str)
    return Document(name, content if is_text else plain_text(content), None if is_text else content)


def _sources(
    path: str | None, fields: list[str] | None, split: str, subset: str | None, skipped: Skipped
) -> Iterator[tuple[str, Iterable[tuple[int | None, Content]]]]:
    """Yield the name of each file or dataset of a corpus, and its contents with their numbers.

    Without a number the content is the file's only text.
    """
    if is_remote(path):
        log.info("streaming %s from the Hugging Face hub", path)
        yield f"{subset or ''}:{split}".lstrip(":"), hub_texts(path, subset, split, fields)
        return
    if is_saved(path):
        yield "row", saved_texts(Path(path).expanduser(), split, fields)
        return
    root, files = _files(path)
    for file in files:
        # Bytes of a file name that are not UTF-8 become \xff, so that any name can be hashed and written.
        name = os.fsencode(file.relative_to(root)).decode("utf-8", "backslashreplace")
        if file.suffix == ".parquet":
            yield name, parquet_texts(file, name, fields)
        elif file.suffix == ".jsonl":
            yield name, jsonl_texts(file, name, fields)
        else:
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                log.log(logging.DEBUG if path is None else logging.WARNING, "left out, not UTF-8: %s", name)
                skipped.not_utf8.append(name)
                continue
            yield name, [(None, text)]


def responses_of(path: str, tokenizer: PreTrainedTokenizerBase | None) -> list[ResponseStore]:
    """Open the stores of a corpus responses:<store>; UserError where one is none, or of another tokenizer."""
    from spectrain.stores.rows import RESPONSES, open_responses  # here: it imports datasets, see stores.tables

    if tokenizer is None:
        raise UserError(
            f"corpus={path} is made of tokens of a target, which +exp=target is to train; give a text corpus"
        )
    folders = path.removeprefix(OF_RESPONSES).split(":")
    if "" in folders or len(set(folders)) < len(folders):
        raise UserError(f"{path} must name different folders of data_prep.responses, separated by colons")
    stores = [open_responses(Path(folder).expanduser()) for folder in folders]
    for store in stores:
        RESPONSES.check_tokenizer(store.folder, store.manifest, tokenizer_fingerprint(tokenizer))
    return stores


def _responses(path: str, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Document]:
    """Yield each response with its prompt; the ids of several stores begin with the store's name."""
    stores = responses_of(path, tokenizer)
    for store in stores:
        before = f"{store.folder.name}:" if len(stores) > 1 else ""
        for row in store.rows.with_format("numpy", columns=["id", "prompt", "response"]):
            tokens, prompt_id = np.concatenate([row["prompt"], row["response"]]).astype(np.int32), str(row["id"])
            yield Document(f"{before}{prompt_id}", "", None, tokens, len(row["prompt"]), prompt_id)


def is_remote(path: str | None) -> bool:
    """Return whether a corpus is a dataset of the hub: nothing exists at its path, and the path looks like an id."""
    if path is None or Path(path).expanduser().exists():
        return False
    return Path(path).suffix not in SUFFIXES and bool(HUB_ID.fullmatch(path))


def _files(path: str | None) -> tuple[Path, list[Path]]:
    """Return a corpus's folder and its files, without those in hidden folders (version control, environments)."""
    is_stdlib, suffixes = path is None, (".py",) if path is None else SUFFIXES
    root = Path(sysconfig.get_paths()["stdlib"] if is_stdlib else path).expanduser()
    if not root.exists():
        raise UserError(f"corpus.path={path} does not exist; give a text file, a .jsonl file or a folder of them")
    if root.is_file():
        return root.parent, [root]

    def refuse(error: OSError) -> None:  # no file may go missing unnoticed
        raise error

    files = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not (name.startswith(".") or (is_stdlib and name in NO_CODE))]
        files += [file for name in names if (file := Path(folder, name)).suffix in suffixes and file.is_file()]
    return root, sorted(files)


def is_held_out(document_id: str, share: float) -> bool:
    """Return whether a document belongs to the held-out `share` (0 to 1) of its corpus, by a hash of its id.

    All turns of a conversation are held out, or none.
    """
    return unit_hash(f"held-out:{LATER_TURN.sub('', document_id)}") < share


def turn_id(question_id: str, turn: int) -> str:
    """Return the id of a question's turn (from 0) as a prompt of its own; that of the first one is the question's."""
    return f"{question_id} turn {turn + 1}" if turn else question_id


def unit_hash(text: str) -> float:
    """Return a number in [0, 1) that is the same for the same text on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of vocab_size entries, the 256 bytes and the end of text (id 0) included."""
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
