"""The paper's own numbers at (64, 512), where its text and figures print them."""

from __future__ import annotations

import pytest
from spectrain.measure.spire_paper import multiplier, paper_tau


@pytest.mark.parametrize(
    ("name", "printed"), [("spire", 2.78), ("vanilla", 1.36), ("magicdec", 2.05), ("dense_kv", 1.70)]
)
def test_the_paper_s_tau_gives_the_paper_s_throughput(name, printed):
    assert round(multiplier(name, paper_tau()[name]), 2) == printed


def test_throughput_follows_tau():
    assert multiplier("hard", 3.4) == pytest.approx(multiplier("spire", 3.4))
    assert multiplier("hard", 1.7) == pytest.approx(multiplier("hard", 3.4) / 2)
