"""A tiny target, a corpus, and `python -m data_prep.datastore` on them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep import datastore as data_datastore
from data_prep import documents
from data_prep import responses as data_responses
from spectrain.cli import command
from spectrain.stores.texts import train_tokenizer
from tests.conftest import tiny_model


def text_of(i: int) -> str:
    return f"def read_{i % 7}(path, n={i}):\n    return open(path).read({i * 37 % 101})\n" * (1 + i % 5)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A tiny target, and a corpus of 40 rows, two copies of such rows and an empty one."""
    root = tmp_path_factory.mktemp("made")
    texts = [text_of(i) for i in range(40)]
    tokenizer = train_tokenizer(texts, 300)
    model = tiny_model("llama", vocab_size=300, eos_token_id=0, num_hidden_layers=2, initializer_range=0.1)
    model.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    rows = [{"text": text, "n": i} for i, text in enumerate([*texts, texts[3], " ", texts[4]])]
    (root / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def small(made) -> list[str]:
    return [
        f"corpus={made / 'corpus.jsonl'}",
        f"target={made / 'target'}",
        "corpus.held_out_share=0.2",
        "window_tokens=48",
        "part_documents=8",
        "batch_tokens=200",
    ]


def caller(name: str, main: Callable, tmp_path: Path, monkeypatch, capfd) -> Callable[..., tuple[int, str, str]]:
    """What runs `data_prep.<name>` in an empty folder; it returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"data_prep.{name}", *arguments])
        code = 0
        try:
            command(name)(main)()
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    return caller("datastore", data_datastore.main, tmp_path, monkeypatch, capfd)


@pytest.fixture
def respond(tmp_path, monkeypatch, capfd):
    return caller("responses", data_responses.main, tmp_path, monkeypatch, capfd)


def contents(folder: Path | str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def kept_ids(folder: Path | str) -> list[str]:
    return [json.loads(line)["id"] for line in (Path(folder) / "documents.jsonl").read_text().splitlines()]


def cut(run, monkeypatch, *arguments: str) -> None:
    """Leaves a build after reading."""
    with monkeypatch.context() as patch:
        patch.setattr(documents.DocumentParts, "score", lambda *arguments: os.kill(os.getpid(), signal.SIGINT))
        assert run(*arguments)[0] == 130
