"""Rows of tables as texts or conversations: JSONL, Parquet, folders of `save_to_disk`, datasets of the hub.

Everything is read row by row or batch by batch, so a table may be larger than memory. Every `*_texts` function yields
the numbers of lines or rows, from 1, with their content, a text or the messages of a conversation. UserError is raised
where a row is malformed or lacks a field.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow.parquet
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from pyarrow import ArrowException

from spectrain.errors import UserError
from spectrain.stores.conversations import Messages, conversation_column, messages_of
from spectrain.stores.prompts import SURROGATE, json_rows

BATCH_ROWS = 1024  # of a Parquet file, read at once
HUB_TIMEOUT_S = 20.0
SAVED = ("dataset_dict.json",), ("dataset_info.json", "state.json")  # what save_to_disk leaves, of splits and of one

Content = str | Messages
Rows = Iterator[tuple[int, Content]]


def jsonl_texts(file: Path, name: str, fields: Sequence[str] | None) -> Rows:
    """Yield the texts of a JSONL file that messages call `name`."""
    for number, row in json_rows(file, name):
        yield number, row_content(row, fields, f"line {number} of {name}")


def parquet_texts(file: Path, name: str, fields: Sequence[str] | None) -> Rows:
    """Yield the texts of a Parquet file that messages call `name`."""
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns, batches = table.schema_arrow.names, table.iter_batches(BATCH_ROWS, columns=fields)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from _texts(rows, columns, name, fields)
    except (ArrowException, OSError) as error:
        raise UserError(f"{name} cannot be read as Parquet ({_line(error)}); fetch or write it again") from error


def is_saved(path: str | None) -> bool:
    """Return whether `datasets.save_to_disk` wrote what lies at a path."""
    if path is None:
        return False
    return any(all(os.path.isfile(Path(path).expanduser() / name) for name in names) for names in SAVED)


def saved_texts(folder: Path, split: str, fields: Sequence[str] | None) -> Rows:
    """Yield the texts of a folder that `datasets.save_to_disk` wrote."""
    import datasets  # here: commands that read no dataset start without it

    try:
        rows = datasets.load_from_disk(str(folder))
    except Exception as error:  # missing or damaged Arrow files
        raise UserError(f"{folder} cannot be read as a saved dataset ({_line(error)}); save it again") from error
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise UserError(f"{folder} has no split {split}; set corpus.split to one of {', '.join(rows)}")
        rows = rows[split]
    yield from _texts(rows, rows.column_names, folder.name, fields)


def hub_texts(name: str, subset: str | None, split: str, fields: Sequence[str] | None) -> Rows:
    """Yield the texts of a dataset of the hub, or of a local folder that `load_dataset` knows, streamed."""
    import datasets  # see saved_texts

    if not Path(name).exists():
        # One request, so that a missing network is noticed before `load_dataset` tries for half a minute.
        where = f"corpus.path={name} is no file or folder here, and as a Hugging Face dataset it"
        try:
            HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
        except HfHubHTTPError as error:
            raise UserError(f"{where} was not found ({_line(error)}); check the name") from error
        except Exception as error:  # the HTTP library's own types
            raise UserError(f"{where} cannot be reached ({_line(error)}); give an existing path") from error
    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=True)
    except Exception as error:  # datasets, its readers and the hub each raise their own types here
        raise UserError(
            f"dataset {name} has no subset {subset or 'by default'} with a split {split} that can be read "
            f"({_line(error)}); change corpus.subset or corpus.split"
        ) from error
    yield from _texts(rows, rows.column_names, name, fields)


def _texts(rows: Iterable[dict], columns: Sequence[str] | None, name: str, fields: Sequence[str] | None) -> Rows:
    """Yield the texts of rows with these columns; None: the columns are not known beforehand."""
    if fields and columns is not None:
        if lacking := [field for field in fields if field not in columns]:
            raise UserError(f"{name} has no text field {lacking[0]!r}; set corpus.fields to its ({', '.join(columns)})")
        if hasattr(rows, "select_columns"):  # a dataset reads only these
            rows = rows.select_columns(fields)
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield number, row_content(row, fields, f"row {number} of {name}")
    except UserError:
        raise
    except Exception as error:  # a shard that is damaged, or the network that went away
        raise UserError(f"{name} cannot be read after row {number} ({_line(error)}); fetch it anew") from error


def row_content(row: dict, fields: Sequence[str] | None, where: str) -> Content:
    """Return the text of a row, or the messages of the conversation that it holds (`conversation_column`).

    The text is that of its fields joined by blank lines. Without `fields` these are all that are strings. A named field
    may also be a list of strings or of {"content": string}; null is an empty text. Halves of characters, which JSON can
    name and UTF-8 cannot (a lone \\ud800), become U+FFFD.

    Raises:
        UserError: a field is missing or is no text; `where` names the row.
    """
    if (column := conversation_column(row, fields)) is not None:
        return messages_of(row[column], where)
    texts = []
    for key in fields or [key for key, value in row.items() if isinstance(value, str)]:
        value = "" if row.get(key) is None else row[key]
        turns = [t.get("content") if isinstance(t, dict) else t for t in value] if isinstance(value, list) else [value]
        if key not in row or not all(isinstance(turn, str) for turn in turns):
            raise UserError(f"{where} has no text field {key!r}; set corpus.fields to keys it has ({', '.join(row)})")
        texts.append("\n\n".join(turns))
    return SURROGATE.sub("\ufffd", "\n\n".join(text for text in texts if text))


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].rstrip('.;') if text else 'no message'}"
