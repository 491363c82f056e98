"""Writes in place: every reader gets the version that it read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memplan.runtime.tape import recording, storages
from memplan.runtime.tape.storages import alias
from memplan.types.errors import MemplanError
from tests.runtime.harness import Job, check, everything, naive_way_fails, outcome


class Net(nn.Module):
    """Two layers and what is written in between, with a few buffers at hand."""

    def __init__(self, write: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 12)
        self.write = write
        self.branches: list[Tensor] = []
        self.calls: Tensor
        self.cache: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(10, 12), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.write(self, torch.tanh(self.first(x)))
        return torch.sigmoid(self.write(self, self.second(x)))


def step(model: Any) -> list[Any]:
    x = torch.randn(6, 8, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    return [loss, x.grad]


def residual(_: Net, x: Tensor) -> Tensor:
    skip = x * 2
    skip.add_(torch.sin(x)).mul_(0.5)
    return torch.relu_(skip + x) * skip


def columns(_: Net, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = x[:, 1] * 2
    x[:, 3:5] += 1
    x[::2] *= 0.5
    return x.exp()


def chunks(_: Net, x: Tensor) -> Tensor:
    x = x * 3
    x[:, :4].view(6, 2, 2)[:, 0].mul_(2)
    x.narrow(1, 4, 4).copy_(x[:, :4] * 2)
    x[:, 8:].t().add_(1)
    with torch.no_grad():
        for part in x.chunk(3, 1):
            part.mul_(0.5)
    return torch.sin(x)


def scattered(_: Net, x: Tensor) -> Tensor:
    rows = torch.tensor([0, 2, 2, 5])
    x = x + 1
    x.index_put_((rows,), x[rows] * 2, accumulate=True)
    x = torch.sin(x).index_add_(0, rows, x[rows])
    x.masked_fill_(x > 1.5, 0.25).masked_scatter_(x < 0, torch.ones(72))
    return x.scatter_(1, torch.zeros(6, 1, dtype=torch.long), 0.5).index_fill_(0, rows, 2) * x.exp()


def preallocated(_: Net, x: Tensor) -> Tensor:
    made = torch.empty(6, 12)
    made[:, :5].copy_(x[:, :5])
    made[:, 5:] = torch.sin(x[:, 5:])
    out = torch.empty(0)
    with torch.no_grad():
        torch.mul(made, 2, out=out)
        torch.add(out, 1, out=out)
    return torch.exp(made) * out


def reused(_: Net, x: Tensor) -> Tensor:
    """One workspace for several results: a version's readers must not see the next."""
    work = torch.zeros(6, 12)
    results = []
    for turn in range(3):
        work.copy_(x.detach() * turn).cos_()
        results.append(torch.sin(x * work.clone()))
    return torch.stack(results).sum(0).exp()


def counter(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    x = torch.sin(x + net.calls)
    net.calls.mul_(3)
    return torch.sin(x - net.calls)


def cache(net: Net, x: Tensor) -> Tensor:
    rows = (torch.arange(6) + int(net.calls)) % 10
    net.cache.index_copy_(0, rows, x.detach())
    net.calls += 2
    return torch.softmax(x @ net.cache.clone().t(), -1) @ net.cache.clone()


def metadata(_: Net, x: Tensor) -> Tensor:
    x = torch.sin(x)
    x.unsqueeze_(0).transpose_(1, 2)
    return x.squeeze_().t_().exp()


def data(net: Net, x: Tensor) -> Tensor:
    mean = torch.zeros(12)
    mean.data = x.detach().mean(0)
    mean.set_(mean.exp().untyped_storage(), 0, (12,), (1,))
    return torch.exp(x - mean)


def overlapping(_: Net, x: Tensor) -> Tensor:
    x = torch.sin(x)
    x[0].add_(x[1])
    x[1:3].add_(x[3:5])
    with torch.no_grad():
        x[4:].mul_(x[:2])
    return x.exp()


def unused_branch(net: Net, x: Tensor) -> Tensor:
    """The version before the write is saved by a graph that nobody differentiates."""
    x = x * 2
    net.branches.append(torch.sin(x))
    x.add_(1)
    return torch.cos(x)


def twice(_: Net, x: Tensor) -> Tensor:
    """The value before the write and the value after it, both saved."""
    x = x * 2
    before = torch.sin(x.clone())
    x.add_(1)
    after = x.clone().exp()
    x.zero_()
    return before * after + x


WRITES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "relu_": lambda _, x: torch.relu_(x * 2) + x,
    "residual": residual,
    "columns": columns,
    "chunks": chunks,
    "scattered": scattered,
    "preallocated": preallocated,
    "reused workspace": reused,
    "metadata": metadata,
    "data and set_": data,
    "overlapping views": overlapping,
    "before and after": twice,
    "unused branch": unused_branch,
}
TO_BUFFERS = {"counter": counter, "cache": cache}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_writes_to_what_forward_made(write: Callable[[Net, Tensor], Tensor]) -> None:
    check(Job(lambda: Net(write), step))


@pytest.mark.parametrize("write", TO_BUFFERS.values(), ids=TO_BUFFERS.keys())
def test_writes_to_buffers_happen_once(write: Callable[[Net, Tensor], Tensor]) -> None:
    job = Job(lambda: Net(write), step)
    assert naive_way_fails(job)
    check(job)


def test_writes_to_the_input() -> None:
    class Masks(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(self.first(x))
            x[:, 0] = 0.5
            x.mul_(2)
            return torch.sin(self.first(x)) * y.exp()

    def step(model: Any) -> list[Any]:
        x = torch.randn(6, 8)
        # The layer's weight gradient needs x as it was: plain eager saves it and would raise.
        model.first.weight.requires_grad_(False)
        loss = model(x).square().mean()
        loss.backward()
        return [loss, x]

    job = Job(lambda: Masks(residual), step)
    assert naive_way_fails(job)
    check(job)


def test_a_write_to_what_backward_needs_never_gives_a_wrong_number() -> None:
    """Plain eager raises. A tape may have what was written over; else it raises too."""

    class Spoils(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.first(x))
            z = y.exp()
            y.mul_(2)
            return z * 2

    def good(model: Any) -> list[Any]:
        x = torch.randn(6, 8, requires_grad=True)
        loss = torch.sigmoid(model.first(x)).exp().mul(2).square().mean()
        loss.backward()
        return [loss, x.grad]

    job = Job(lambda: Spoils(residual), step)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outcome(job)
    try:
        taped = outcome(job, everything(Job(lambda: Net(residual), step)))
    except (RuntimeError, MemplanError):
        return
    assert taped.differences(outcome(Job(lambda: Spoils(residual), good))) == []


def test_without_copies_of_old_versions_replays_read_the_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(lambda: Net(counter), step)
    decisions = everything(job)
    monkeypatch.setattr(recording, "copy_of_storage", alias)
    monkeypatch.setattr(storages, "copy_of_storage", alias)
    with pytest.raises(MemplanError, match=r"modified in place|gave other values"):
        outcome(job, decisions)
