"""scripts/compare_datastores.py: what a store of documents would have saved while known answers were written."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np

from spectrain.measure.simulation import Text

SCRIPT = Path(__file__).parent.parent / "scripts" / "compare_datastores.py"


def test_a_store_of_the_answer_itself_saves_steps_and_another_saves_none(monkeypatch):
    spec = importlib.util.spec_from_file_location("compare_datastores", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_datastores", script)  # its dataclasses look their module up
    spec.loader.exec_module(script)
    answer = list(range(20, 60))
    measured = {"set": [Text([1, 2, 3], answer)]}
    (own,) = script.counted_steps([np.array([2, 3, *answer])], 100, measured, 8)["set"]
    (other,) = script.counted_steps([np.arange(60, 100)], 100, measured, 8)["set"]
    assert own[0] == other[0] == len(answer) - 1  # the first token is that of the prompt's forward
    assert own[1] < 12
    assert other[1] == other[0]
