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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import TextIOWrapper
from itertools import chain, combinations, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spectrain.config.groups import Corpus
from spectrain.data.chats import Broken, Chat, Row, Tally, plain_text, read_row
from spectrain.data.tabular_files import LINES, Rows, file_rows, hub_rows, is_saved, opened, saved_rows, suffix_of
from spectrain.errors import UserError
from spectrain.stores.folder import MANIFEST
from spectrain.target import tokenizer_fingerprint

if TYPE_CHECKING:
    from spectrain.stores.rows import ResponseStore

log = logging.getLogger(__name__)

CORPUS_ADVICE = "mend or remove what cannot be read, or name the columns of its text by corpus.fields"
OF_RESPONSES = "responses:"
END_OF_TEXT = "<|endoftext|>"
SUFFIXES = (
    *(".txt", ".md", ".rst", ".tex", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala"),
    *(".js", ".jsx", ".ts", ".tsx", ".cs", ".swift", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".sh"),
    *(".sql", ".proto", ".html", ".css"),
)
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")  # name or owner/name
NO_CODE = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}  # installed packages, tables
LATER_TURN = re.compile(r" turn \d+$")  # see `turn_id`
OFTEN_SETTINGS = (".json", ".csv", ".tsv")  # files that in a folder of sources hold no texts, or comments
FIRST_ROWS = 10  # of a table in a folder, which is left out where none of them can be read
STDLIB_HELD_OUT = 0.05  # share of the library's modules that no training sees


@dataclass(frozen=True)
class Document:
    """One text, conversation, or prompt with its response. Its id, a path or a row's number, is unique in a corpus."""

    id: str
    text: str  # of a conversation its turns; of a response empty
    chat: Chat | None = None  # of a conversation, which ends with a reply
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
        return (self.text if self.chat is None else json.dumps([*vars(self.chat).values()])).encode()


def read_documents(
    path: str | None,
    fields: str | list[str] | None = None,
    split: str = "train",
    subset: str | None = None,
    tally: Tally | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    shuffled: bool = False,
) -> Iterator[Document]:
    """Yield the documents of a corpus, one by one. Without a `tally`, log at its end what was left out.

    Args:
        path: a file; a folder, of which every file that `SUFFIXES` names is read; a folder that
            `datasets.save_to_disk` wrote; `responses:` with a store of data_prep.responses after it, or several with
            colons between them; otherwise the id of a Hugging Face dataset, which is streamed. A table gives one
            document per row (`chats.read_row`). None: the sources of this interpreter's standard library, without
            installed packages and modules of data (`encodings`).
        fields: columns of a row that hold its conversation, or its texts, which are joined by blank lines. None: as
            the row's columns say.
        split: of a dataset.
        subset: of a dataset on the hub.
        tally: counts what is read and left out.
        tokenizer: of the target, whose ids a store of responses must hold.
        shuffled: whether the files of a folder come in hashed order, and not in that of their names.

    Raises:
        UserError: there is no such corpus, a file cannot be read, or too many of its rows cannot.
    """
    own = tally is None
    tally = Tally(path or "the library", CORPUS_ADVICE) if own else tally
    fields = [fields] if isinstance(fields, str) else fields or ()
    if path is not None and path.startswith(OF_RESPONSES):
        yield from _responses(path, tokenizer)
        return
    for name, row, _ in source_rows(path, fields, split, subset, tally, shuffled=shuffled):
        if row.chat is None:
            if row.text.strip():
                tally.take(row)
                yield Document(name, row.text)
            else:
                tally.skipped["empty"] += 1
        elif (chat := row.chat.answered()) is None:
            tally.skipped["without a reply" if row.chat.messages else "empty"] += 1
        elif row.rejected_by:
            tally.skipped[f"marked as not to be learned (`{row.rejected_by}`)"] += 1
        else:
            tally.take(replace(row, chat=chat))
            yield Document(name, plain_text(chat.messages), chat)
    tally.check()
    if own and tally.is_remarkable:
        log.info(tally.say())


def corpus_documents(
    corpus: Corpus, tally: Tally, tokenizer: PreTrainedTokenizerBase | None = None, shuffled: bool = False
) -> Iterator[Document]:
    """Yield the documents of all sources of a corpus interleaved, as often as their weights say.

    See `read_documents`. Of several sources, ids begin with the path.

    Raises:
        UserError: two sources have the same rows, or there is another number of weights or limits.
    """
    paths, sources = corpus.paths, []
    for name in ("weights", "limits"):
        given = getattr(corpus, name)
        if given is not None and len(given) != len(paths):
            raise UserError(f"corpus.{name} has {len(given)} values for {len(paths)} sources; give one for each")
    places = [Path(path).expanduser().resolve() if path and not is_remote(path) else path for path in paths]
    for one, other in combinations(places, 2):
        are_here = isinstance(one, Path) and isinstance(other, Path)
        if one == other or (are_here and (one.is_relative_to(other) or other.is_relative_to(one))):
            raise UserError(f"corpus has the same rows twice, in {one} and {other}; give each source once")
    for number, path in enumerate(paths):
        documents = read_documents(path, corpus.fields, corpus.split, corpus.subset, tally, tokenizer, shuffled)
        documents = islice(documents, corpus.limits[number] if corpus.limits else None)
        if len(paths) > 1:
            documents = _named(documents, path)
        sources.append(_repeated(documents, corpus.weights[number]) if corpus.weights else documents)
    while sources:
        for source in list(sources):
            if (document := next(source, None)) is None:
                sources.remove(source)
            else:
                yield document


def _named(documents: Iterable[Document], path: str | None) -> Iterator[Document]:
    for document in documents:  # held out as where it is read alone
        by = document.prompt_id or document.id
        yield replace(document, id=f"{path or 'library'}:{document.id}", prompt_id=by)


def _repeated(documents: Iterable[Document], weight: float) -> Iterator[Document]:
    """Yield each document `weight` times, and once more with the chance of what is left; a hash of its id decides."""
    for document in documents:
        for turn in range(int(weight) + (unit_hash(f"weight:{document.id}") < weight % 1)):
            by = document.prompt_id or document.id  # all copies are held out, or none
            yield replace(document, id=f"{document.id} again {turn}", prompt_id=by) if turn else document


def source_rows(
    path: str | None,
    fields: Sequence[str],
    split: str,
    subset: str | None,
    tally: Tally,
    option: str = "corpus.path",
    shuffled: bool = False,
) -> Iterator[tuple[str, Row, Mapping]]:
    """Yield the id of each file of text and each row of a table, its content, and the row by column.

    See `read_documents`. The tally counts rows that are broken; `option` gave the path.
    """
    try:
        for name, rows in _sources(path, fields, split, subset, tally, option, shuffled):
            if isinstance(rows, str):
                yield name, Row("files", text=rows), {}
                continue
            what = "line" if suffix_of(Path(name)) in LINES else "row"
            for number, found in rows:
                try:
                    if isinstance(found, Broken):
                        raise found
                    row = read_row(found, fields)
                    tally.ignored.update(row.ignored)
                    yield f"{name}:{number}", row, found
                except Broken as error:
                    tally.refuse(f"{what} {number} of {name}", str(error))
    except OSError as error:  # no file may go missing unnoticed
        reason = error.strerror or error
        raise UserError(f"{error.filename or path} cannot be read ({reason}); make it readable or remove it") from error


def _sources(
    path: str | None,
    fields: Sequence[str],
    split: str,
    subset: str | None,
    tally: Tally,
    option: str,
    shuffled: bool,
) -> Iterator[tuple[str, str | Rows]]:
    """Yield the name of each file or dataset of a corpus, with its text or its rows."""
    if is_remote(path):
        log.info("streaming %s from the Hugging Face hub", path)
        yield f"{subset or ''}:{split}".lstrip(":"), hub_rows(path, subset, split, fields)
        return
    if is_saved(path):
        yield "row", saved_rows(Path(path).expanduser(), split, fields)
        return
    root, files = _files(path, option)
    # Bytes of a file name that are not UTF-8 become \xff, so that any name can be hashed and written.
    named = [(os.fsencode(file.relative_to(root)).decode("utf-8", "backslashreplace"), file) for file in files]
    for name, file in sorted(named, key=lambda pair: unit_hash(pair[0])) if shuffled else named:
        if (rows := file_rows(file, name, fields)) is not None:
            if file == Path(path).expanduser():
                yield name, rows
                continue
            try:
                first = list(islice(rows, FIRST_ROWS))
            except UserError as error:
                if suffix_of(file) not in OFTEN_SETTINGS:
                    raise
                first = [(0, Broken(str(error)))]
            if not first or any(_fits(row, fields) for _, row in first):
                yield name, chain(first, rows)
            else:  # settings or numbers that lie beside the texts
                log.warning("left out, a table without conversations, questions or texts: %s", name)
                tally.skipped["tables of other things"] += 1
            continue
        try:
            with opened(file) as content, TextIOWrapper(content, encoding="utf-8") as lines:
                text = lines.read()  # with \n at the end of every line
        except UnicodeDecodeError:
            log.log(logging.DEBUG if path is None else logging.WARNING, "left out, not UTF-8: %s", name)
            tally.skipped["not UTF-8"] += 1
            continue
        yield name, text


def _fits(row: Mapping | Broken, fields: Sequence[str]) -> bool:
    try:
        return not isinstance(row, Broken) and read_row(row, fields) is not None
    except Broken:
        return False


def responses_of(path: str, tokenizer: PreTrainedTokenizerBase | None) -> list[ResponseStore]:
    """Open the stores of a corpus responses:<store>; UserError where one is none, or of another tokenizer."""
    from spectrain.stores.rows import RESPONSES, open_responses  # here: it imports datasets, see stores.tables

    if tokenizer is None:
        raise UserError(
            f"corpus={path} is made of tokens of a target, which +exp=target is to train; give a text corpus"
        )
    folders = path.removeprefix(OF_RESPONSES).split(":")
    if "" in folders or len(set(folders)) < len(folders):
        raise UserError(f"{path} must name different folders made by spectrain responses, separated by colons")
    for folder in map(Path, folders):
        waiting = folder.with_name(f".{folder.name}.partial")  # see spectrain.serving.request_log
        if not folder.exists() and any(waiting.glob("rows-*.jsonl")):
            raise UserError(
                f"{folder} has no answers yet: a server keeps its first ones in {waiting} and makes the store of them "
                "once there are 64, or when it ends; wait for either"
            )
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
    return suffix_of(Path(path)) not in SUFFIXES and bool(HUB_ID.fullmatch(path))


def _files(path: str | None, option: str) -> tuple[Path, list[Path]]:
    """Return a corpus's folder and its files, without those in hidden folders (version control, environments)."""
    is_stdlib, suffixes = path is None, (".py",) if path is None else SUFFIXES
    root = Path(sysconfig.get_paths()["stdlib"] if is_stdlib else path).expanduser()
    if not root.exists():
        raise UserError(
            f"{option}={path} does not exist; give a file of text or rows, a folder of them, or the id of a dataset"
        )
    if root.is_file():
        return root.parent, [root]

    def refuse(error: OSError) -> None:  # no file may go missing unnoticed
        raise error

    files = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not (name.startswith(".") or (is_stdlib and name in NO_CODE))]
        files += [file for name in names if suffix_of(file := Path(folder, name)) in suffixes and file.is_file()]
    return root, sorted(files)


def files_of(path: str | None) -> list[Path]:
    """Return the files by which a corpus on disk changes."""
    if path is not None and path.startswith(OF_RESPONSES):
        return [Path(folder, MANIFEST).expanduser() for folder in path.removeprefix(OF_RESPONSES).split(":")]
    if is_saved(path):
        return sorted(file for file in Path(path).expanduser().rglob("*") if file.is_file())
    return _files(path, "corpus.path")[1]


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
