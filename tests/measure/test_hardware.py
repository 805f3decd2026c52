"""The measurement of this CPU, on small matrices."""

from __future__ import annotations

import pytest
import torch
from spectrain.measure.hardware import measure_cpu

from spectrain.errors import UserError
from spectrain.measure import hardware


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rates_are_work_over_the_median_time(dtype, monkeypatch):
    """A clock that says 2 s for every product, 0.5 s for every stream; 9 s in the warm-up and in a disturbed repeat."""
    seconds = iter([9.0, 9.0, 2.0, 0.5, 9.0, 9.0, 2.0, 0.5])  # the warm-up and three repeats
    now = [0.0, None]

    def clock() -> float:
        if now[1] is None:
            now[1] = next(seconds)
        else:
            now[0], now[1] = now[0] + now[1], None
        return now[0]

    monkeypatch.setattr(hardware.time, "perf_counter", clock)
    found = measure_cpu(dtype, repeats=3, n=64, stream_bytes=4 * 64 * 100)
    assert found["flops_per_s"] == 2 * 64**3 / 2.0
    assert found["bytes_per_s"] == 4 * 64 * 100 / 0.5
    assert f", {torch.get_num_threads()} thread" in found["name"]


def test_other_numbers_cannot_be_measured():
    with pytest.raises(UserError, match="dtype=fp8 cannot be measured on the CPU; give fp32 or bf16"):
        measure_cpu("fp8")
