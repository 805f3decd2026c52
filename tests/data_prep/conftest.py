"""A tiny target, a corpus, responses and drafters; the commands of data_prep on them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep import documents
from spectrain import cli
from spectrain.data.texts import train_tokenizer
from spectrain.stores.rows import AcceptanceStore, ResponseManifest, write_responses
from spectrain.target import fingerprint, load_target, tokenizer_fingerprint
from tests.conftest import noisy_copy, tiny_model
from tests.models.test_artifacts import export_spire

N_ROWS, LONG = 14, 9  # one is longer than the target's context
LENGTHS = (lambda i: 1 + i * 7 % 11, lambda i: i * 5 % 17)  # tokens of a row's prompt and response
RESPONSES_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 1.0, "min_p": 0.0}


def text_of(i: int) -> str:
    return f"def read_{i % 7}(path, n={i}):\n    return open(path).read({i * 37 % 101})\n" * (1 + i % 5)


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def ready(made, tmp_path_factory) -> Path:
    """Responses of the tiny target, a draft model that is its noisy copy, and a SPIRe drafter."""
    root = tmp_path_factory.mktemp("ready")
    target = load_target(made / "target", device="cpu")
    noisy_copy(target.model, 0.2).save_pretrained(root / "draft")
    target.tokenizer.save_pretrained(root / "draft")
    export_spire(root / "spire", target, k=3, window_tokens=7)
    save_responses(root / "responses", target, N_ROWS)
    return root


def save_responses(folder: Path, target, n_rows: int, lengths: list[tuple[int, int]] | None = None) -> None:
    """`lengths` are the tokens of prompt and response of each row."""
    generator = torch.Generator().manual_seed(0)

    def draw(n_tokens: int) -> list[int]:
        return torch.randint(4, 300, (n_tokens,), generator=generator).tolist()

    if lengths is None:
        lengths = [tuple(length(i) for length in LENGTHS) for i in range(n_rows)]
        lengths[LONG] = (200, 60)
    rows = [
        {
            "id": f"q{i}",
            "category": "c",
            "prompt": draw(n_prompt),
            "response": draw(n_response),
            "finish_reason": "length",
            "sampling": RESPONSES_SAMPLING,
            "seed": 0,
            "number": 100 + i,
        }
        for i, (n_prompt, n_response) in enumerate(lengths)
    ]
    manifest = ResponseManifest(
        target="the tiny target",
        target_fingerprint=fingerprint(target.model, target.tokenizer),
        tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
        sampling=RESPONSES_SAMPLING,
        max_new_tokens=64,
        config={},
        counts={"prompts": n_rows, "responses": n_rows, "failed": 0, "tokens": 1},
    )
    write_responses(folder, rows, manifest)


@pytest.fixture
def small(made) -> list[str]:
    return build_options(made)


def build_options(made: Path) -> list[str]:
    """Of a datastore, in parts of eight documents."""
    return [
        f"corpus={made / 'corpus.jsonl'}",
        f"target={made / 'target'}",
        "corpus.held_out_share=0.2",
        "window_tokens=48",
        "part_documents=8",
        "batch_tokens=200",
    ]


def caller(module: str, tmp_path: Path, monkeypatch, capfd) -> Callable[..., tuple[int, str, str]]:
    """Return what runs the command of a module in an empty folder, and returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        code = 0
        try:
            cli.run(module)
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    return caller("data_prep.datastore", tmp_path, monkeypatch, capfd)


@pytest.fixture
def respond(tmp_path, monkeypatch, capfd):
    return caller("data_prep.responses", tmp_path, monkeypatch, capfd)


def contents(folder: Path | str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def kept_ids(folder: Path | str) -> list[str]:
    return [json.loads(line)["id"] for line in (Path(folder) / "documents.jsonl").read_text().splitlines()]


def cut(run, monkeypatch, *arguments: str) -> None:
    """Leaves a build after reading."""
    with monkeypatch.context() as patch:
        patch.setattr(documents.DocumentParts, "make", lambda *arguments: os.kill(os.getpid(), signal.SIGINT))
        assert run(*arguments)[0] == 130


def same_rows(one: AcceptanceStore, other: AcceptanceStore) -> bool:
    """Floats within rounding."""
    for a, b in zip(one.rows, other.rows, strict=True):
        if any(a[name] != b[name] for name in ("id", "prompt", "response", "drafts")):
            return False
        if any(not np.allclose(a[name], b[name], rtol=1e-4, atol=1e-6) for name in ("p", "q", "labels")):
            return False
        if "states" in a and (
            a["drafted"] != b["drafted"] or not np.allclose(*map(flat, (a, b)), rtol=2e-3, atol=2e-3)
        ):
            return False
    return True


def flat(row: dict) -> list[float]:
    return [value for states in row["states"] for value in states]


def source(shared: Path) -> list[str]:
    return [f"corpus={shared / 'corpus'}", f"target={shared / 'target'}", "corpus.held_out_share=0.3"]


def training_options(shared) -> list[str]:
    """Overrides that make a training take a second."""
    return [
        "+exp=spire",
        *source(shared),
        "data.row_tokens=32",
        "data.batch_size=2",
        "data.val_rows=2",
        "max_steps=6",
        "trainer.log_every_n_steps=1",
        "trainer.val_check_interval=4",
        "tau.context_tokens=[16,32]",
        "tau.contexts=2",
        "tau.new_tokens=6",
        "tau.timed_contexts=1",
    ]


def curve(run_dir: Path | str, column: str) -> list[float]:
    (file,) = Path(run_dir).glob("metrics/version_*/metrics.csv")
    head, *lines = file.read_text().splitlines()
    place = head.split(",").index(column)
    return [float(line.split(",")[place]) for line in lines if line.split(",")[place]]
