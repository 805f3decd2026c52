"""scripts/compare_methods.py: finished benchmarks in one table."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from spectrain.decoding.generation import Choices
from spectrain.measure.results import QuestionRow
from tests.support.scripts import load_script

CHOICES = [Choices("pld", "fastest", 1.5, 12)]  # as `max_nodes=auto` leaves them


def written(folder: Path, seconds: float, forwards: int) -> str:
    """Write a run in which plain decoding takes a second for 11 tokens, and `pld` takes `seconds`."""
    folder.mkdir()
    answer = {"question_id": "1", "category": "c", "turns": 1, "replies": [list(range(11))]}
    rows = [
        QuestionRow(method="autoregressive", target_forwards=10, seconds=1.0, **answer),
        QuestionRow(method="pld", target_forwards=forwards, seconds=seconds, choices=CHOICES, **answer),
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return str(folder)


def test_runs_are_shown_beside_each_other_and_pooled(tmp_path, monkeypatch, capsys):
    script = load_script("compare_methods")
    runs = [written(tmp_path / "a", 0.5, 4), written(tmp_path / "b", 0.75, 6)]  # both have a question "1"
    monkeypatch.setattr(sys, "argv", ["compare_methods.py", *runs])
    script.main()
    head, _, plain, pld = capsys.readouterr().out.splitlines()
    assert head == "| method | a: speed | tau | b: speed | tau | all: speed | tau |"
    assert [cell.split(" ")[0] for cell in plain.split(" | ")[1:6:2]] == ["1.00"] * 3
    cells = pld.strip("| ").split(" | ")
    assert (cells[1][:4], cells[2], cells[3][:4], cells[4]) == ("2.00", "2.50", "1.33", "1.67")
    assert (cells[5][:4], cells[6]) == ("1.60", "2.00")  # 22 tokens in 1.25 s over 22 in 2 s; 20 in 10 forwards
    monkeypatch.setattr(sys, "argv", ["compare_methods.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="holds no questions.jsonl"):
        script.main()
