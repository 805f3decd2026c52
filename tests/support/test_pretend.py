"""The pretended device computes as the CPU does, keeps host and device apart, and counts what is copied."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.pretend import pretend_device


@pytest.fixture
def device():
    with torch.inference_mode(), pretend_device() as device:
        yield device


@pytest.fixture
def x(device):
    """[2, 3] on the device: 0 .. 5."""
    return torch.arange(6.0, device=device.device).view(2, 3)


READS = {
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0, 1].item(),
    "bool": lambda x: bool(x[0, 1]),
    "int": lambda x: int(x[0, 1]),
    "float": lambda x: float(x[0, 1]),
    "slice by a tensor": lambda x: [0, 1, 2][: x.long()[0, 1]],
    "in": lambda x: 3 in x,
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to, asynchronous": lambda x: x.to("cpu", non_blocking=True),
    "copy_": lambda x: torch.empty(2, 3).copy_(x),
    "copy_ to pinned memory": lambda x: torch.empty(2, 3, pin_memory=True).copy_(x, non_blocking=True),
    "equal": lambda x: torch.equal(x, x + 0),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where of a condition": lambda x: torch.where(x > 1),
    "a mask as index": lambda x: x[x > 1],
    "a mask as index of a write": lambda x: x.index_put_((x > 1,), x[0, 0]),
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x[0].repeat_interleave(x[1].long()),
}


@pytest.mark.parametrize("name", READS)
def test_counts_each_read_once(device, x, name):
    READS[name](x)
    assert (len(device.reads), len(device.writes)) == (1, 0)
    assert device.reads[0].waits == (name not in ("to, asynchronous", "copy_ to pinned memory"))


WRITES = {
    "tensor": lambda device: torch.tensor([1, 2], device=device),
    "as_tensor": lambda device: torch.as_tensor([1, 2], device=device),
    "to": lambda device: torch.tensor([1, 2]).to(device),
    "copy_": lambda device: torch.empty(2, device=device).copy_(torch.ones(2)),
    "new_tensor": lambda device: torch.empty(2, device=device).new_tensor([1, 2]),
    "a list as index": lambda device: torch.ones(3, device=device)[[2, 0]],
    "an index of the host": lambda device: torch.ones(3, device=device)[torch.tensor([2, 0])],
}


@pytest.mark.parametrize("name", WRITES)
def test_counts_each_write_once(device, name):
    found = WRITES[name](device.device)
    assert (len(device.reads), len(device.writes)) == (0, 1)
    assert found.tolist() in ([1, 2], [1, 1])


def test_what_stays_on_the_device_copies_nothing(device, x):
    y = torch.cat([x + 1, x.new_zeros(1, 3), torch.full((1, 3), 2.0, device=device.device)])
    y[0, 1], y[1:] = 0.5, y[1:] * torch.tensor(3.0)  # a number of the host is an argument of the kernel
    y = F.softmax(y.masked_fill(y > 2, 0), dim=-1).to(device.device).to(torch.float64)
    assert y.argmax(-1).device == device.device
    assert not device.reads + device.writes


MIXTURES = {
    "add": lambda x: x + torch.ones(2, 3),
    "add in place": lambda x: torch.ones(2, 3).add_(x),
    "add to a number of the host in place": lambda x: torch.tensor(1.0).add_(x[0, 0]),
    "cat": lambda x: torch.cat([x, torch.ones(1, 3)]),
    "matmul": lambda x: x @ torch.ones(3, 1),
    "linear": lambda x: F.linear(x, torch.ones(1, 3)),
    "embedding": lambda x: F.embedding(torch.tensor([1]), x),
    "gather": lambda x: x.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
    "gather on the host": lambda x: torch.ones(2, 3).gather(0, x.long()),
    "index of the device": lambda x: torch.ones(9)[x.long()],
    "assigned values": lambda x: x.index_put_((x[0, :2].long(),), torch.ones(2, 3)),
    "mask": lambda x: x.masked_fill(torch.ones(2, 3, dtype=torch.bool), 0),
    "generator": lambda x: torch.rand(3, device=x.device, generator=torch.Generator()),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_refuses_to_mix_host_and_device(x, name):
    with pytest.raises(RuntimeError, match="same device|generator of the device"):
        MIXTURES[name](x)
