"""Damaged files of every kind that commands read: cut off, with bytes changed, or with odd values."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.fuzz.world import BUILD, World

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


@dataclass(frozen=True)
class Reader:
    """A command that reads a file or folder of the world."""

    source: str  # in the world
    command: str
    option: str | None  # by which it is given; None: the command finds it by its name
    changed: tuple[str, ...] = ()  # options in place of the command's own
    writes: bool = False  # the command goes on in it

    @property
    def drops(self) -> set[str]:
        return {change.lstrip("+").split("=")[0] for change in self.changed} | {self.option or ""}


LONG = ("prompts={world}/long_prompts.jsonl", *BUILD, "limit=null")
READERS: dict[str, Reader] = {
    "prompts": Reader("prompts.jsonl", "bench", "prompts"),
    "prompts of responses": Reader("prompts.jsonl", "responses", "prompts"),
    "corpus": Reader("corpus", "datastore", "corpus"),
    "corpus of train": Reader("corpus", "train", "corpus"),
    "target": Reader("target", "generate", "target"),
    "target of bench": Reader("target", "bench", "target"),
    "target of cost": Reader("target", "cost", "target"),
    "drafter": Reader("vanilla", "generate", "drafter", ("method=speculative",)),
    "drafter of spire": Reader("spire", "generate", "drafter", ("method=spire",)),
    "drafter of cost": Reader("spire", "cost", "drafter"),
    "vanilla of cost": Reader("vanilla", "cost", "drafter"),
    "method": Reader("spire", "generate", "method"),
    "responses": Reader("responses", "acceptance", "responses"),
    "features": Reader("features", "train", "data.path", ("data=offline",)),
    "labels": Reader("labels", "train", "data.path", ("+exp=specdecpp", "data=offline", "drafter={world}/vanilla")),
    "datastore": Reader("datastore", "generate", "datastore", ("method=rest",)),
    "datastore of export": Reader(
        "datastore", "export", "datastore", ("method=rest", "run=null", "target={world}/target")
    ),
    "inspect": Reader("datastore", "datastore", "inspect"),
    "run": Reader("vanilla_run", "export", "run"),
    "last weights of a run": Reader("vanilla_run", "export", "run", ("weights=last",)),
    "run of parity": Reader("spire_run", "parity", "run"),
    "finished run": Reader("spire_run", "train", "run_dir", writes=True),
    "unfinished run": Reader("unfinished_run", "train", "run_dir", writes=True),
    "runs": Reader("vanilla_run", "report", "runs"),
    "runs of bench": Reader("bench", "report", "runs"),
    "runs of tune": Reader("tables", "report", "runs"),
    "out of bench": Reader("bench", "bench", "out", writes=True),
    "out of tune": Reader("tables/tune", "tune", "out", writes=True),
    "results": Reader("bench/results.json", "cost", "results"),
    "results of a training": Reader("spire_run/result.json", "cost", "results"),
    "tuned": Reader("tuned.yaml", "generate", "tuned"),
    "forward times": Reader(
        "tables/checkpoints", "bench", None, ("methods=[logitspec]", "max_nodes=auto"), writes=True
    ),
    "begun build": Reader("begun/.responses.partial", "responses", None, LONG, writes=True),
    "complete build": Reader("complete/.responses.partial", "responses", None, LONG, writes=True),
}
# Files without which nothing can be read, and damages that no reader may pass over. `report` names and leaves out.
NEEDED = (".safetensors", ".arrow", ".npy", ".yaml", "manifest.json", "config.json", "tokenizer.json", "prompts.jsonl")
NOT_NEEDED = ("generation_config.json", "tokenizer_config.json")
WRONG_TYPE, HUGE = "wrong type", "huge number"  # of one value
FATAL = ("cut off", "removed", "empty", "binary", "a folder", "nested deeply", "yaml bomb")


@dataclass(frozen=True)
class FileCase:
    """One file of what a command reads, damaged in one way."""

    reader: str  # a key of READERS
    file: str  # below its source; the first that this pattern fits
    damage: str  # a key of DAMAGES, or WRONG_TYPE or HUGE
    seed: int  # of the place and the value; of WRONG_TYPE and HUGE the number of the place

    @property
    def command(self) -> str:
        return READERS[self.reader].command

    @property
    def must_refuse(self) -> bool:
        if self.damage not in FATAL or self.command == "report" or READERS[self.reader].writes:
            return False
        if READERS[self.reader].source == "spire" and self.file == "tokenizer.json":  # the target's is read
            return False
        # What is cut off may be a line that is not read, or an empty one.
        behind_what_is_read = self.file in ("prompts.jsonl", "tuned.yaml") and self.damage == "cut off"
        if READERS[self.reader].command == "cost" and self.file != "config.json":  # the rest is not read
            return False
        if behind_what_is_read or (self.reader.startswith("last weights") and "/best/" in self.file):
            return False
        return self.file.endswith(NEEDED) and not self.file.endswith(NOT_NEEDED)


def file_cases(world: World) -> st.SearchStrategy[FileCase]:
    """Draw a reader, one of its files, and a damage."""
    files = {name: _files(world.folder / reader.source) for name, reader in READERS.items()}
    seeds, damages = st.integers(0, 2**32 - 1), st.sampled_from(sorted(DAMAGES))
    return st.sampled_from(sorted(READERS)).flatmap(
        lambda name: st.builds(FileCase, st.just(name), st.sampled_from(files[name]), damages, seeds)
    )


def every_value(world: World) -> list[FileCase]:
    """Each value of each file that is read in turn: in its place one of another type, and for a number a huge one."""
    cases = []
    for name, reader in READERS.items():
        source = world.folder / reader.source
        for file in _files(source):
            content = _content(source if source.is_file() else source / file)
            for number, (node, key) in enumerate(_places(content)):
                is_number = isinstance(node[key], int | float)
                cases += [FileCase(name, file, damage, number) for damage in (WRONG_TYPE, HUGE)[: 1 + is_number]]
    return cases


def _files(source: Path) -> list[str]:
    """The files below a folder, relative to it; of a file, its own name."""
    if source.is_file():
        return [source.name]
    return sorted(str(f.relative_to(source)) for f in source.rglob("*") if f.is_file() and f.name != ".output")


def arguments(case: FileCase, world: World, folder: Path) -> tuple[str, ...]:
    """Copy what the command reads into `folder`, damage one file of it, and return the command as typed."""
    reader = READERS[case.reader]
    source, copy = world.folder / reader.source, folder / Path(reader.source).name
    shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    file = min(copy.glob(case.file)) if source.is_dir() else copy
    if case.damage in (WRONG_TYPE, HUGE):
        _replace(file, case.seed, case.damage)
    else:
        DAMAGES[case.damage](file, random.Random(case.seed))
    own = [text for text in world.commands[reader.command] if text.lstrip("+").split("=")[0] not in reader.drops]
    if reader.option == "inspect":
        own = []
    changed = [change.format(world=world.folder) for change in reader.changed]
    return reader.command, *own, *changed, *([f"{reader.option}={copy}"] if reader.option else [])


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
    if file.suffix == ".safetensors":
        return _tensor(file, rng)
    if file.suffix in (".yaml", ".csv", ".md", ".jinja", ".py"):
        return _lines(file, rng)
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


def _replace(file: Path, number: int, damage: str) -> None:
    """Replace the value with this number in a JSON or YAML file by one of another type, or by a huge number."""
    content = _content(file)
    node, key = list(_places(content))[number]
    is_number, is_text = isinstance(node[key], int | float), isinstance(node[key], str)
    other = "x" if is_number else 5 if is_text or isinstance(node[key], dict | list) else {"a": 1}
    node[key] = 10**30 if damage == HUGE else other
    file.write_text(yaml.safe_dump(content) if file.suffix == ".yaml" else json.dumps(content))


def _content(file: Path) -> object:
    """What a JSON or YAML file holds; None where it is another file, or a tokenizer's vocabulary."""
    if file.suffix not in (".json", ".yaml") or file.name == "tokenizer.json":
        return None
    return yaml.safe_load(file.read_text()) if file.suffix == ".yaml" else json.loads(file.read_text())


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


def _number(file: Path, rng: random.Random) -> None:
    """Put an odd number or a text in the place of a number of a JSON file."""
    try:
        content = json.loads(file.read_text())
    except ValueError:
        return _lines(file, rng)
    places = [(node, key) for node, key in _places(content) if type(node[key]) in (int, float)]
    if places:
        node, key = rng.choice(places)
        node[key] = rng.choice(
            (0, -1, 1, 2, 3, node[key] + 1, 10**6, 10**12, 2**63, 0.5, "4", None, True, float("nan"))
        )
    file.write_text(json.dumps(content))
    return None


def _header(file: Path, rng: random.Random) -> None:
    """Change the header of a safetensors file: its length, or a value in it."""
    content = file.read_bytes()
    if file.suffix != ".safetensors" or len(content) < 8:
        return _flip(file, rng)
    size = int.from_bytes(content[:8], "little")
    if rng.random() < 0.3:
        size = rng.choice((0, 1, size + 1, 2**31, 2**63))
        file.write_bytes(size.to_bytes(8, "little") + content[8:])
        return None
    header = json.loads(content[8 : 8 + size])
    node, key = rng.choice(list(_places(header)))
    node[key] = rng.choice(ODD_VALUES)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    return None


def _deep(file: Path, rng: random.Random) -> None:
    opened, closed = rng.choice((("[", "]"), ('{"a":', "}")))
    file.write_text(opened * DEEP + "1" + closed * DEEP)


def _long_integer(file: Path, rng: random.Random) -> None:
    file.write_text(f'{{"version": {LONG_INT}, "kind": {LONG_INT}, "prompt": {LONG_INT}}}')


def _another_type(file: Path, rng: random.Random) -> None:
    """Put another value in the place of all that a JSON file holds."""
    if file.suffix != ".json":
        return _lines(file, rng)
    file.write_text(rng.choice(("[]", "[1, 2]", "null", "{}", "5", '"x"')))
    return None


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
    "another type": _another_type,
    "yaml bomb": _bomb,
    "number": _number,
    "another number": _number,
    "header": _header,
    "tensor": _tensor,
}
