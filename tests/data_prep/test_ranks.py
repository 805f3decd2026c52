"""Two real ranks give what one process gives, with every command; in one launch, so that imports are paid once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from spectrain.retrieval.datastore import PARTS
from spectrain.stores.rows import open_acceptance
from spectrain.target import load_target
from tests import ranks
from tests.data_prep.conftest import (
    build_options,
    contents,
    kept_ids,
    same_rows,
    save_responses,
    source,
)
from tests.support import forks

N_RESPONSES = 120  # each a part, except the one that is too long


def options(made: Path, ready: Path, shared: Path, folder: Path) -> dict[str, list[str]]:
    """What is typed behind each command."""
    target, answered = f"target={made / 'target'}", f"responses={folder / 'many'}"
    rows = [{"question_id": f"q{i}", "category": "c", "turns": [f"def read_{i}("]} for i in range(12)]
    rows[7]["turns"] = ["def read(path): " * 60]  # no room for its response
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shards = ["row_tokens=32", "shard_tokens=270"]
    return {
        "datastore": build_options(made),
        "responses": [f"prompts={folder / 'p.jsonl'}", target, "max_new_tokens=16"],
        "acceptance": [target, answered, f"drafter={ready / 'draft'}", "draws=2", "part_rows=1", "batch_tokens=40"],
        "activations": [*source(shared), *shards, "batch_tokens=100", "precision=32-true"],
    }


@pytest.fixture(scope="module")
def launch(made, ready, shared, tmp_path_factory) -> tuple[Path, dict[str, list[str]], subprocess.CompletedProcess]:
    """All commands on two ranks; their folder, their options, and what they said. `many` is labelled in part before."""
    folder = tmp_path_factory.mktemp("two")
    save_responses(folder / "many", load_target(made / "target", device="cpu"), N_RESPONSES)
    typed = options(made, ready, shared, folder)
    kill_amid(folder / ".acceptance.partial", [*typed["acceptance"], f"out={folder / 'acceptance'}"])
    jobs = [
        {"command": f"data_prep.{name}", "arguments": [*arguments, f"out={folder / name}"]}
        for name, arguments in typed.items()
    ]
    jobs[1]["code"] = 2  # a prompt without room
    ended = ranks.launch(2, folder, jobs)
    return folder, typed, ended


def kill_amid(work: Path, arguments: list[str]) -> None:
    """Kills data_prep.acceptance after twenty parts."""
    command = [os.environ.get(forks.PYTHON, sys.executable), "-m", "data_prep.acceptance", *arguments]
    started = subprocess.Popen(command, env={**os.environ, **ranks.ENVIRONMENT}, stderr=subprocess.DEVNULL)
    while len(list(work.glob("part-*"))) < 20:
        assert started.poll() is None
        time.sleep(0.005)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    n_done = len(list(work.glob("part-*")))
    assert 20 <= n_done < N_RESPONSES - 1
    (work.parent / "killed after").write_text(str(n_done))


def alone(launch, name: str, *more: str) -> Path:
    """What one process makes."""
    folder, typed, _ = launch
    torch.set_num_threads(1)
    one = folder / "one"
    assert ranks.run([*typed[name], f"out={one / name}", *more], command=f"data_prep.{name}") == 0
    return one / name


@pytest.mark.slow
def test_a_datastore_keeps_the_same_documents(launch):
    folder, _, ended = launch
    assert ended.stdout.count("documents read") == 1
    one, two = alone(launch, "datastore"), folder / "datastore"
    assert kept_ids(two) == kept_ids(one)
    arrays = [name for name in contents(one) if name.endswith(".npy")]
    assert len(arrays) == len(PARTS)
    assert all(contents(one)[name] == contents(two)[name] for name in arrays)


@pytest.mark.slow
def test_activations_are_the_same_bytes(launch):
    folder, _, ended = launch
    assert ended.stdout.count("bytes per token") == 1
    assert contents(alone(launch, "activations")) == contents(folder / "activations")
    assert not (folder / ".activations.partial").exists()


@pytest.mark.slow
def test_a_killed_labelling_goes_on(launch):
    folder, _, ended = launch
    n_done = int((folder / "killed after").read_text())
    assert f"{n_done} of {N_RESPONSES - 1} parts are labelled already" in ended.stderr
    assert ended.stdout.count("mean acceptance") == 1
    assert same_rows(open_acceptance(folder / "acceptance"), open_acceptance(alone(launch, "acceptance")))
    assert not (folder / ".acceptance.partial").exists()


@pytest.mark.slow
def test_responses_are_resumed_as_one(launch, capfd):
    folder, typed, ended = launch
    work = folder / ".responses.partial"
    assert ended.stderr.count(f"1 of 12 prompts failed (listed in {work}/failed-*.jsonl)") == 1
    files = [work / f"rows-{rank}.jsonl" for rank in range(2)]
    assert [len(file.read_text().splitlines()) for file in files] == [6, 5]
    lines = files[1].read_text().splitlines(keepends=True)
    files[1].write_text("".join(lines[:3]) + lines[3][:20])
    again = [*typed["responses"], "allow_failed=true", f"out={folder / 'responses'}"]
    assert ranks.run(again, command="data_prep.responses") == 0
    assert "9 of 12 prompts are answered already" in capfd.readouterr().err
    assert contents(alone(launch, "responses", "allow_failed=true")) == contents(folder / "responses")
