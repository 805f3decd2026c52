"""Damaged files of every kind that commands read: cut off, with bytes changed, or with odd values."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.fuzz.world import World

DEEP = 10_000  # levels of nesting
LONG_INT = "9" * 5000
BOMB = "\n".join(
    ["a0: &a0 [x,x,x,x,x,x,x,x,x]", *(f"a{i + 1}: &a{i + 1} [{','.join([f'*a{i}'] * 9)}]" for i in range(12))]
)
ODD_VALUES = (
    *(
        None,
        True,
        False,
        0,
        -1,
        2**31,
        2**63,
        -(2**63),
        1.5,
        1e308,
        "",
        "x",
        "ü💥\x00",
        [],
        {},
        [None],
        {"a": 1},
        [[[]]],
    ),
    *(float("nan"), float("inf"), "<script>", "../..", 10**400),
)

# What reads which files: option -> (folder or file of the world, command, other options in place of the command's own)
READERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "prompts": ("prompts.jsonl", "bench", ()),
    "prompts of responses": ("prompts.jsonl", "responses", ()),
    "corpus": ("corpus", "datastore", ()),
    "corpus of train": ("corpus", "train", ()),
    "target": ("target", "generate", ()),
    "target of cost": ("target", "cost", ()),
    "drafter": ("vanilla", "generate", ("method=speculative",)),
    "drafter of spire": ("spire", "generate", ("method=spire",)),
    "drafter of cost": ("spire", "cost", ()),
    "responses": ("responses", "acceptance", ()),
    "data.path": ("features", "train", ("data=offline",)),
    "data.path of labels": ("labels", "train", ("+exp=specdecpp", "data=offline")),
    "datastore": ("datastore", "generate", ("method=rest",)),
    "inspect": ("datastore", "datastore", ()),
    "run": ("vanilla_run", "export", ()),
    "run of parity": ("spire_run", "parity", ()),
    "runs": ("vanilla_run", "report", ()),
    "runs of bench": ("bench", "report", ()),
    "out of bench": ("bench", "bench", ()),
    "results": ("bench/results.json", "cost", ()),
    "tuned": ("tuned.yaml", "generate", ()),
}


@dataclass(frozen=True)
class FileCase:
    """One file of what a command reads, damaged in one way."""

    reader: str  # a key of READERS
    number: int  # which of the files, modulo their count
    damage: str  # a key of DAMAGES
    seed: int  # of the place and the value


def file_cases() -> st.SearchStrategy[FileCase]:
    seeds = st.integers(0, 2**32 - 1)
    return st.builds(
        FileCase, st.sampled_from(sorted(READERS)), st.integers(0, 99), st.sampled_from(sorted(DAMAGES)), seeds
    )


def arguments(case: FileCase, world: World, folder: Path) -> tuple[str, ...]:
    """Copy what the command reads into `folder`, damage one file of it, and return the command as typed."""
    source, command, changed = READERS[case.reader]
    copy = folder / Path(source).name
    original = world.folder / source
    if original.is_dir():
        shutil.copytree(original, copy)
        files = sorted(path for path in copy.rglob("*") if path.is_file() and path.name != ".output")
    else:
        shutil.copy(original, copy)
        files = [copy]
    file = files[case.number % len(files)]
    DAMAGES[case.damage](file, random.Random(case.seed))
    option = case.reader.split(" of ")[0]
    drop = {option, *(change.lstrip("+").split("=")[0] for change in changed)}
    if "+exp=specdecpp" in changed:
        drop.add("drafter")
        changed = (*changed, f"drafter={world.folder}/vanilla")
    own = [text for text in world.commands[command] if text.lstrip("+").split("=")[0] not in drop]
    if option == "inspect":
        own = []
    return command, *own, *changed, f"{option}={copy}"


def _cut(file: Path, rng: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content))] if content else b"")


def _flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 8)) if content else 0):
        content[rng.randrange(len(content))] = rng.randrange(256)
    file.write_bytes(bytes(content))


def _remove(file: Path, rng: random.Random) -> None:
    file.unlink()


def _empty(file: Path, rng: random.Random) -> None:
    file.write_bytes(b"")


def _binary(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.randbytes(rng.randrange(1, 4000)))


def _folder(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _value(file: Path, rng: random.Random) -> None:
    """Replace, remove or add one value somewhere in a JSON file, or in one line of JSON lines."""
    if file.suffix in (".yaml", ".safetensors"):
        return _tensor(file, rng) if file.suffix == ".safetensors" else _lines(file, rng)
    lines = file.suffix == ".jsonl"
    try:
        content = (
            [json.loads(line) for line in file.read_text().splitlines()] if lines else json.loads(file.read_text())
        )
    except ValueError:
        return _flip(file, rng)
    places = list(_places(content))
    if places:
        node, key = rng.choice(places)
        if rng.random() < 0.2:
            del node[key]
        else:
            node[key] = rng.choice(ODD_VALUES)
    texts = [json.dumps(row) for row in content] if lines else [json.dumps(content)]
    file.write_text("\n".join(texts) + "\n")
    return None


def _places(node: object) -> list[tuple[object, object]]:
    if isinstance(node, dict | list):
        keys = list(node) if isinstance(node, dict) else range(len(node))
        below = [place for key in keys for place in _places(node[key])]
        return [(node, key) for key in keys] + below
    return []


def _lines(file: Path, rng: random.Random) -> None:
    """Write one odd line in place of a line of text."""
    try:
        lines = file.read_text().splitlines() or [""]
    except ValueError:
        return _flip(file, rng)
    odd = ["{", "[]", "null", "5", '{"prompt": 5}', '{"turns": []}', "\x00", "a: b: c", "- x", LONG_INT, "x" * 100_000]
    lines[rng.randrange(len(lines))] = rng.choice(odd)
    file.write_text("\n".join(lines) + "\n")
    return None


def _deep(file: Path, rng: random.Random) -> None:
    opened, closed = rng.choice((("[", "]"), ('{"a":', "}")))
    file.write_text(opened * DEEP + "1" + closed * DEEP)


def _long_integer(file: Path, rng: random.Random) -> None:
    file.write_text(f'{{"version": {LONG_INT}, "kind": {LONG_INT}, "prompt": {LONG_INT}}}')


def _bomb(file: Path, rng: random.Random) -> None:
    file.write_text(BOMB)


def _tensor(file: Path, rng: random.Random) -> None:
    """Drop, reshape or spoil one tensor of a safetensors file; flip a byte of another."""
    try:
        tensors = load_file(file)
    except Exception:  # of another format
        return _flip(file, rng)
    if not tensors:
        return None
    name = rng.choice(sorted(tensors))
    match rng.randrange(4):
        case 0:
            del tensors[name]
        case 1:
            tensors[name] = torch.zeros(3, 5)
        case 2:
            tensors[name] = torch.full_like(tensors[name].float(), float("nan"))
        case 3:
            tensors["unknown"] = torch.zeros(2)
    save_file(tensors, file, metadata={"format": "pt"})
    return None


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "cut off": _cut,
    "bytes changed": _flip,
    "removed": _remove,
    "empty": _empty,
    "binary": _binary,
    "a folder": _folder,
    "value": _value,
    "another value": _value,  # twice as often as the others
    "line": _lines,
    "nested deeply": _deep,
    "long integer": _long_integer,
    "yaml bomb": _bomb,
    "tensor": _tensor,
}
