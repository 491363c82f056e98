from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from memplan.types.trace import Phase, Trace
from tests.capturing.jobs import record


def moved(trace: Trace, op: str) -> list[int]:
    names = np.array(trace.strings)[trace.ops.name]
    rows = np.flatnonzero(np.char.startswith(names, f"aten.{op}."))
    return [int(size) for size in trace.ops.moved_bytes[rows]]


def flops(trace: Trace) -> int:
    return int(trace.ops.flops.sum())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, bias=False)
        self.grouped = nn.Conv2d(8, 8, 3, groups=4)
        self.up = nn.ConvTranspose2d(8, 4, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.grouped(self.down(x)))


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 32)
        self.two = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(self.one(x).relu())
        z = torch.baddbmm(y, y @ x.transpose(1, 2), x)
        return torch.bmm(z, z.transpose(1, 2))


@pytest.mark.parametrize(
    ("make", "shape"), [(Convolutions, (2, 3, 17, 19)), (Products, (2, 5, 16))]
)
def test_operations_are_those_that_pytorch_counts(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    def job() -> None:
        make().to("cuda")(torch.randn(shape, device="cuda")).sum().backward()

    with FlopCounterMode(display=False) as counter:
        make()(torch.randn(shape)).sum().backward()
    assert flops(record(job)) == counter.get_total_flops() > 0


def test_attention_counts_forward_and_backward() -> None:
    shape = (2, 4, 64, 32)

    def job() -> None:
        q, k, v = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    product = 2 * 2 * 4 * 64 * 64 * 32
    assert flops(record(job)) == (2 + 5) * product


def test_the_same_shapes_count_the_same_each_time() -> None:
    def job() -> None:
        a, b = torch.randn(4, 8, device="cuda"), torch.randn(8, 16, device="cuda")
        for _ in range(3):
            a @ b
        a @ b[:, :2]

    assert flops(record(job)) == 3 * 2 * 4 * 8 * 16 + 2 * 4 * 8 * 2


def test_bytes_are_those_of_the_views() -> None:
    def job() -> None:
        x = torch.randn(8, 100, device="cuda")
        x[:2].add(1.0)
        x[:1].expand(8, 100).mul(2.0)
        x[:2].mul_(2.0)
        x[:2].copy_(x[2:4])
        x.t()

    trace = record(job)
    assert moved(trace, "add") == [2 * 800]
    assert moved(trace, "mul") == [400 + 3200]
    assert moved(trace, "mul_") == [2 * 800]
    assert moved(trace, "copy_") == [2 * 800]
    assert moved(trace, "t") == [0]


def test_look_ups_and_updates_touch_what_they_name() -> None:
    def job() -> None:
        table = torch.zeros(1000, 16, device="cuda")
        index = torch.zeros(4, dtype=torch.long, device="cuda")
        rows = F.embedding(index, table)
        table.index_add_(0, index, rows)
        torch.zeros_like(table)
        torch.empty_like(table)

    trace = record(job)
    assert moved(trace, "embedding") == [2 * 256 + 32]
    assert moved(trace, "index_add_") == [3 * 256 + 32]
    assert moved(trace, "zeros_like") == [64_000]
    assert moved(trace, "empty_like") == [0]


def test_views_write_nothing() -> None:
    def job() -> None:
        x = torch.randn(4, 6, device="cuda")
        x.t().view(6, 4).detach()
        x.add_(1.0)

    trace = record(job)
    names = [trace.strings[number] for number in trace.ops.name]
    writes = np.diff(trace.ops.writes_start).tolist()
    assert writes[names.index("aten.t.default")] == 0
    assert writes[names.index("aten.detach.default")] == 0
    assert writes[names.index("aten.add_.Tensor")] > 0


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(y) * 2.0


def test_calls_of_root_modules_are_numbered() -> None:
    def job() -> None:
        model = Outer().to("cuda")
        for _ in range(2):
            out = model(torch.randn(4, device="cuda", requires_grad=True))
            out.sum().backward()

    trace = record(job)
    names = [trace.strings[number] for number in trace.ops.name]
    calls = trace.ops.call
    forward = trace.ops.phase == Phase.FORWARD
    exponentials = [row for row, name in enumerate(names) if name == "aten.exp.default"]
    assert [int(calls[row]) for row in exponentials if forward[row]] == [0, 0, 1, 1]
    assert [int(calls[row]) for row in exponentials if not forward[row]] == [-2, -2]
    assert all(calls[row] == -1 for row, name in enumerate(names) if name == "aten.sum.default")
