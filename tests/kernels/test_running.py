"""How threads share operations: results do not depend on their number, and a thread that is late delays nobody."""

import pytest
import torch

from spectrain.kernels.cpu.operations import STATE_BYTES, TAKEN
from spectrain.kernels.cpu.running import Table, product_lines


@pytest.fixture
def n_threads():
    """Sets the number of torch's threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 3])
def test_pieces_whose_thread_never_comes_back_are_computed_by_who_waits_for_them(n, n_threads):
    n_threads(n)
    draws = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 64, generator=draws), torch.randn(400, 64, generator=draws)
    y = torch.zeros(2, 400)
    lines, own_bytes = product_lines(x, weight, None, y, n)
    table = Table(lines, n, own_bytes)
    states = table._states[-table._states.ctypes.data % STATE_BYTES :].view("int64")
    states[:] = 0
    states[TAKEN // 8] = 2  # by a thread that has lost its core
    table._parallel(*table._arguments)
    torch.testing.assert_close(y, x @ weight.T, rtol=1e-4, atol=1e-4)
