"""Rows of tables as texts: JSONL lines, Parquet files, folders of `save_to_disk`, datasets of the Hugging Face hub.

Everything is read row by row or batch by batch, so a table may be larger than memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import pyarrow.parquet
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from pyarrow import ArrowException

from spectrain.decoding.errors import UserError
from spectrain.stores.prompts import parse_row

BATCH_ROWS = 1024  # of a Parquet file, read at once
HUB_TIMEOUT_S = 20.0
SURROGATE = re.compile("[\ud800-\udfff]")
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
SAVED, SAVED_SPLITS = "dataset_info.json", "dataset_dict.json"  # what save_to_disk leaves in a folder


def jsonl_texts(file: Path, name: str, fields: Sequence[str] | None) -> Iterator[tuple[int, str]]:
    """Line numbers, from 1, and texts of a JSONL file; empty lines are passed over.

    Raises:
        UserError: a line is malformed or lacks a field.
    """
    # newline="\n": nothing else ends a line, neither a carriage return nor a U+2028 inside a JSON string.
    with file.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{name} line {number}"
                yield number, row_text(parse_row(line, where), fields, where)


def parquet_texts(file: Path, name: str, fields: Sequence[str] | None) -> Iterator[tuple[int, str]]:
    """Row numbers, from 1, and texts of a Parquet file.

    Raises:
        UserError: the file is damaged, or lacks a field.
    """
    try:
        # Opened here: pyarrow itself takes no path that is not UTF-8.
        with file.open("rb") as content, pyarrow.parquet.ParquetFile(content) as table:
            missing = [field for field in fields or () if field not in table.schema_arrow.names]
            if missing:
                raise UserError(_no_such_field(name, missing[0], table.schema_arrow.names))
            number = 0
            for batch in table.iter_batches(BATCH_ROWS, columns=list(fields) if fields else None):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row_text(row, fields, f"{name} row {number}")
    except (ArrowException, OSError) as error:
        raise UserError(f"{name} cannot be read as Parquet ({_line(error)}); fetch or write it again") from error


def saved_texts(folder: Path, split: str, fields: Sequence[str] | None) -> Iterator[tuple[int, str]]:
    """Row numbers, from 1, and texts of a folder that `datasets.save_to_disk` wrote.

    Raises:
        UserError: the folder is damaged, or lacks the split or a field.
    """
    yield from _texts(_open_saved(folder, split), folder.name, fields)


def hub_texts(name: str, subset: str | None, split: str, fields: Sequence[str] | None) -> Iterator[tuple[int, str]]:
    """Row numbers, from 1, and texts of a dataset of the hub, or of a local folder that `load_dataset` knows; streamed.

    Raises:
        UserError: there is no network, no such dataset, subset, split or field.
    """
    if not Path(name).exists():
        _check_reachable(name)
    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=True)
    except Exception as error:  # datasets, its readers and the hub each raise their own types here
        raise UserError(
            f"dataset {name} has no subset {subset or 'by default'} with a split {split} that can be read "
            f"({_line(error)}); change corpus.subset or corpus.split"
        ) from error
    yield from _texts(rows, name, fields)


def _check_reachable(name: str) -> None:
    """One request, so that a missing network is noticed before `load_dataset` tries for half a minute."""
    where = f"corpus.path={name} is no file or folder here, and as a Hugging Face dataset it"
    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError as error:
        raise UserError(f"{where} was not found ({_line(error)}); check the name") from error
    except Exception as error:  # the HTTP library's own types
        raise UserError(
            f"{where} cannot be reached ({_line(error)}); give an existing path, or an id while online"
        ) from error


def _texts(rows, name: str, fields: Sequence[str] | None) -> Iterator[tuple[int, str]]:
    columns = rows.column_names
    missing = [field for field in fields or () if columns is not None and field not in columns]
    if missing:
        raise UserError(_no_such_field(name, missing[0], columns))
    if fields and columns is not None:
        rows = rows.select_columns(list(fields))
    iterator, number = iter(rows), 0
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # a shard that is damaged, or the network that went away
            raise UserError(f"{name} cannot be read behind row {number} ({_line(error)}); try again later") from error
        number += 1
        yield number, row_text(row, fields, f"{name} row {number}")


def row_text(row: dict, fields: Sequence[str] | None, where: str) -> str:
    """The text of a row: its fields joined by blank lines. Without `fields`, every field that is a string.

    A named field may also be a conversation, a list of strings or of {"content": string}; null is an empty text. Halves
    of characters, which JSON can name and UTF-8 cannot (a lone \\ud800), become U+FFFD.

    Raises:
        UserError: a field is missing or is no text.
    """
    keys = fields or [key for key, value in row.items() if isinstance(value, str)]
    texts = []
    for key in keys:
        text = _field_text(row.get(key)) if key in row else None
        if text is None:
            raise UserError(f"{where} has no text field {key!r}; set corpus.fields to keys it has ({', '.join(row)})")
        texts.append(text)
    return SURROGATE.sub("\ufffd", "\n\n".join(text for text in texts if text))


def _field_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        return None
    turns = [turn.get("content") if isinstance(turn, dict) else turn for turn in value]
    return "\n\n".join(turns) if all(isinstance(turn, str) for turn in turns) else None


def _open_saved(folder: Path, split: str) -> datasets.Dataset:
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # missing or damaged Arrow files
        raise UserError(f"{folder} cannot be read as a saved dataset ({_line(error)}); save it again") from error
    if isinstance(found, datasets.Dataset):
        return found
    if split not in found:
        raise UserError(f"{folder} has no split {split}; set corpus.split to one of {', '.join(found)}")
    return found[split]


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return (folder / SAVED_SPLITS).is_file() or ((folder / SAVED).is_file() and (folder / "state.json").is_file())


def looks_like_hub_id(path: str) -> bool:
    """Whether a path that does not exist may be a dataset's id: `name` or `owner/name`."""
    return HUB_ID.fullmatch(path) is not None


def parquet_bytes(file: Path) -> int:
    """Uncompressed size of a Parquet file's columns; 0 where it cannot be read, which reading then says."""
    try:
        with file.open("rb") as content:
            metadata = pyarrow.parquet.read_metadata(content)
    except (ArrowException, OSError):
        return 0
    return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))


def _no_such_field(name: str, field: str, columns: Sequence[str]) -> str:
    return f"{name} has no text field {field!r}; set corpus.fields to columns it has ({', '.join(columns)})"


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].rstrip('.;') if text else 'no message'}"
