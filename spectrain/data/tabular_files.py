"""Rows of tables: JSON, JSON lines, CSV, Parquet, also compressed; folders of `save_to_disk`, datasets of the hub.

Everything is read row by row or batch by batch, so a table may be larger than memory. Every function yields the
numbers of lines or rows, from 1, with the row by column, or with what is wrong with it (`chats.Broken`).
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

import pyarrow
import pyarrow.parquet
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from pyarrow import ArrowException

from spectrain.data import known
from spectrain.data.chats import Broken
from spectrain.errors import UserError
from spectrain.stores.files import parse_json

BATCH_ROWS = 1024  # of a Parquet file, read at once
PROBED_CHARACTERS = 1 << 20  # of a JSON file, by which its kind is told
READ_CHARACTERS = 1 << 20  # of a JSON array, at once
LONGEST_ROW = 1 << 28  # characters of an element, a line or a cell
SPACE = re.compile(r"[\s,]*")  # between elements
HUB_TIMEOUT_S = 20.0
SAVED = ("dataset_dict.json",), ("dataset_info.json", "state.json")  # what save_to_disk leaves, of splits and of one
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
SHOWN_CHARACTERS = 40  # of a wrong value in a message

LINES = (".jsonl", ".ndjson")

Rows = Iterator[tuple[int, Mapping | Broken]]


def suffix_of(file: Path) -> str:
    """Return the suffix of a file's content in small letters: .jsonl of chats.jsonl.gz."""
    return (Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix).lower()


def opened(file: Path) -> BinaryIO:
    """Open a file to be read, decompressed where its name says that it is compressed."""
    if file.suffix not in COMPRESSED:
        return file.open("rb")
    raw = pyarrow.OSFile(str(file))
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, COMPRESSED[file.suffix]))


def file_rows(file: Path, name: str, columns: Sequence[str] = ()) -> Rows | None:
    """Yield the rows of a file that messages call `name`, of a Parquet file these columns alone; None: it is no table.

    Raises:
        UserError: the file cannot be read as what its name says.
    """
    read = READERS.get(suffix_of(file))
    return None if read is None else _naming(read(file, name, columns), name)


def _naming(rows: Rows, name: str) -> Rows:
    try:
        yield from rows
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
    except (ArrowException, csv.Error, EOFError, RecursionError) as error:
        raise UserError(f"{name} cannot be read ({_line(error)}); fetch or write it again") from error


def _lines(file: Path, name: str, columns: Sequence[str]) -> Rows:
    with opened(file) as lines:
        for number, line in enumerate(lines, start=1):  # as bytes only a line feed ends a line, no U+2028
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, _row(parse_json(text))
            except UnicodeDecodeError as error:
                yield number, Broken(f"is not UTF-8 (byte {error.start + 1})")
            except json.JSONDecodeError as error:
                yield number, Broken(f"is not JSON ({error.msg}, column {error.colno})")
            except (ValueError, RecursionError) as error:  # NaN or Infinity, or too deep
                yield number, Broken(f"cannot be read ({error})")


def _json(file: Path, name: str, columns: Sequence[str]) -> Rows:
    """Yield the objects of arrays, of the only list of an object, of lines, or the object that the file is."""
    with opened(file) as content, io.TextIOWrapper(content, encoding="utf-8-sig") as text:
        begin = text.read(PROBED_CHARACTERS)
        if begin.lstrip()[:1] == "[":
            yield from enumerate(map(_row, _elements(text, begin, name)), start=1)
            return
    first, _, second = begin.lstrip().partition("\n")
    try:
        one = json.loads(first) if second.strip() else None
    except ValueError:
        one = None
    if isinstance(one, Mapping):
        yield from _lines(file, name, columns)
        return
    with opened(file) as content, io.TextIOWrapper(content, encoding="utf-8-sig") as text:
        try:
            value = parse_json(text.read())
        except ValueError as error:
            raise UserError(f"{name} is not JSON ({_line(error)}); mend it") from error
    is_row = not isinstance(value, Mapping) or value.keys() & set(known.TURNS)
    lists = [] if is_row else [found for found in value.values() if isinstance(found, list) and found]
    if len(lists) == 1 and not any(not isinstance(row, Mapping) or row.keys() & {"role", "from"} for row in lists[0]):
        yield from enumerate(lists[0], start=1)
    else:
        yield 1, _row(value)


def _elements(text: TextIO, kept: str, name: str) -> Iterator[object]:
    """Yield the elements of one JSON array or of several, one by one, however long they are.

    `kept` is what was read of the text already.
    """
    decoder, place, n_found, size, inside = json.JSONDecoder(), 0, 0, READ_CHARACTERS, False
    while True:
        place = SPACE.match(kept, place).end()
        sign = kept[place : place + 1]
        if sign == ("]" if inside else "["):
            place, inside = place + 1, not inside
            continue
        try:
            if not inside:
                raise json.JSONDecodeError("Expecting an array", kept, place)
            value, place = decoder.raw_decode(kept, place)
        except json.JSONDecodeError as error:
            more = text.read(size)
            if not more and not inside and not sign:
                return
            if not more or len(kept) - place > LONGEST_ROW:
                raise UserError(f"{name} is not JSON behind row {n_found} ({error.msg}); mend it") from error
            kept, place, size = kept[place:] + more, 0, 2 * size
            continue
        size = READ_CHARACTERS
        yield value
        n_found += 1


def _row(value: object) -> Mapping | Broken:
    if isinstance(value, Mapping):
        return value
    text = json.dumps(value)
    text = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}.."
    return Broken(f"is no JSON object but {text}; give objects with named values")


def _csv(file: Path, name: str, columns: Sequence[str]) -> Rows:
    csv.field_size_limit(LONGEST_ROW)
    with opened(file) as content, io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
        begin = text.read(PROBED_CHARACTERS)
    signs = "\t,;|" if suffix_of(file) == ".tsv" else ",;\t|"
    headers = {sign: next(csv.reader(io.StringIO(begin, newline=""), delimiter=sign), []) for sign in signs}
    # What separates columns is what gives the header the most names that we know, or else the most names.
    known_names = {sign: known.COLUMNS.intersection(map(str.strip, header)) for sign, header in headers.items()}
    sign = max(signs, key=lambda sign: (len(known_names[sign]), len(headers[sign])))
    is_spaced = {cell[:1] for cell in headers[sign][1:]} == {" "}
    with opened(file) as content, io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
        rows = csv.DictReader(text, delimiter=sign, skipinitialspace=is_spaced)
        for number, row in enumerate(rows, start=1):
            if len(row) < len(rows.fieldnames):
                row = Broken("has two columns of one name")
            elif None in row or None in row.values():
                row = Broken(f"has another number of cells than the {len(rows.fieldnames)} columns")
            else:
                row = {name.strip(): cell for name, cell in row.items()}
            yield number, row


def _parquet(file: Path, name: str, columns: Sequence[str]) -> Rows:
    with pyarrow.parquet.ParquetFile(file) as table:
        chosen = _projected(columns, table.schema_arrow.names)
        batches = table.iter_batches(BATCH_ROWS, columns=chosen)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def _projected(columns: Sequence[str], names: Sequence[str]) -> list[str] | None:
    """Return what is read of a table for these columns: what belongs to a conversation, too; None: all."""
    if not columns or not set(names).issuperset(columns):
        return None
    return [*columns, *(name for name in known.OF_CONVERSATIONS if name in names and name not in columns)]


READERS = {
    **dict.fromkeys(LINES, _lines),
    ".json": _json,
    **dict.fromkeys((".csv", ".tsv"), _csv),
    ".parquet": _parquet,
}


def is_saved(path: str | None) -> bool:
    """Return whether `datasets.save_to_disk` wrote what lies at a path."""
    if path is None:
        return False
    return any(all(os.path.isfile(Path(path).expanduser() / name) for name in names) for names in SAVED)


def saved_rows(folder: Path, split: str, columns: Sequence[str] = ()) -> Rows:
    """Yield the rows of a folder that `datasets.save_to_disk` wrote."""
    import datasets  # here: commands that read no dataset start without it

    try:
        rows = datasets.load_from_disk(str(folder))
    except Exception as error:  # missing or damaged Arrow files
        raise UserError(f"{folder} cannot be read as a saved dataset ({_line(error)}); save it again") from error
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise UserError(f"{folder} has no split {split}; set corpus.split to one of {', '.join(rows)}")
        rows = rows[split]
    yield from _dataset_rows(rows, folder.name, columns)


def hub_rows(name: str, subset: str | None, split: str, columns: Sequence[str] = ()) -> Rows:
    """Yield the rows of a dataset of the hub, or of a local folder that `load_dataset` knows, streamed."""
    import datasets  # see saved_rows

    if not Path(name).exists():
        # One request, so that a missing network is noticed before `load_dataset` tries for half a minute.
        where = f"{name} is no file or folder here, and as a Hugging Face dataset it"
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
    yield from _dataset_rows(rows, name, columns)


def _dataset_rows(rows: Iterable[dict], name: str, columns: Sequence[str]) -> Rows:
    if (chosen := _projected(columns, rows.column_names or ())) is not None:  # a dataset reads only these
        rows = rows.select_columns(chosen)
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield number, row
    except Exception as error:  # a shard that is damaged, or the network that went away
        raise UserError(f"{name} cannot be read after row {number} ({_line(error)}); fetch it anew") from error


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].rstrip('.;') if text else 'no message'}"
