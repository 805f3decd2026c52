"""scripts/compare_datastores.py: what a store of documents would have saved while known answers were written."""

from __future__ import annotations

import numpy as np
from spectrain.measure.simulation import Text

from tests.support.scripts import load_script


def test_a_store_of_the_answer_itself_saves_steps_and_another_saves_none():
    script = load_script("compare_datastores")
    answer = list(range(20, 60))
    measured = {"set": [Text([1, 2, 3], answer)]}
    (own,) = script.counted_steps([np.array([2, 3, *answer])], 100, measured, 8)["set"]
    (other,) = script.counted_steps([np.arange(60, 100)], 100, measured, 8)["set"]
    assert own[0] == other[0] == len(answer) - 1  # the first token is that of the prompt's forward
    assert own[1] < 12
    assert other[1] == other[0]
