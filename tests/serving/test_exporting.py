"""Where exports go: no run's export is ever replaced by another run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrain.errors import UserError
from spectrain.serving.exporting import engine_path, named
from spectrain.training.runs import RunFolder


def begun(path: str, run_id: str) -> RunFolder:
    run = RunFolder(Path(path), {"kind": "spire"}, run_id)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    run.begin()
    run.note_attempt(0, {})
    return run


def exported(run: RunFolder, says: str, out: str | None = None) -> Path:
    return run.export(out, lambda folder, _: (folder / "said").write_text(says))


def test_a_run_that_replaces_another_replaces_its_export(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exported(begun("runs/try", "try-11111111"), "old")
    anew = begun("runs/try", "try-33333333")  # fresh=true
    assert exported(anew, "new") == Path("checkpoints/try")
    assert Path("checkpoints/try/said").read_text() == "new"


def test_a_given_folder_is_never_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exported(begun("a/try", "try-11111111"), "first", out="made")
    with pytest.raises(UserError, match="out=made exists already"):
        exported(begun("b/try", "try-22222222"), "second", out="made")


def test_cards_name_folders_as_given_and_no_machines_paths():
    assert named(Path("exported/spire")) == "exported/spire"
    assert named(Path("/home/somebody/exported/spire")) == "spire"
    assert engine_path("pystdlib-8l") == "checkpoints/pystdlib-8l"
    assert engine_path("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"
    assert engine_path("") == ""
