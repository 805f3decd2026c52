"""Pictures of a training are drawn whatever its measurements were."""

from __future__ import annotations

import pytest

from spectrain.reporting.training_plot import plot_training


@pytest.mark.parametrize("ends", [(1.9, 2.1), (float("nan"), float("nan")), (2.0 + 1e-15, 2.1)])
def test_a_curve_is_drawn_with_any_interval(tmp_path, ends):
    """Of one context the interval is no number, and rounding may put an end beyond the value."""
    low, high = ends
    measured = {"eval/loss": 1.0, "eval/tau": 2.0, "eval/tau_low": low, "eval/tau_high": high}
    found = plot_training(tmp_path, {1: {"train/loss": 1.5}, 3: measured})
    assert found == {"curve": tmp_path / "curve.png"}
    assert found["curve"].stat().st_size > 5000
