"""A capture must not change what it measures: its requests equal those of a real run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.trace import EventKind


class FanOut(nn.Module):
    """One value used eight times: seven gradient additions in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1000, 1000, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        return sum((h * (i + 2.0) for i in range(8)), start=h.sin()).sum()


class SharedGradient(nn.Module):
    """`a + b` hands the same gradient to both sides, so that adding in place is not allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1000, 1000, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        total = h
        for _ in range(4):
            total = total + h
        return (total + h.tanh()).sum()


class Residual(nn.Module):
    """A transformer-like stack: norms, residual additions, a tied weight, a reused module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 256)
        self.shared = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(x)
        for _ in range(3):
            x = x + self.down(torch.relu(self.up(x)))
            x = x + self.shared(x).sigmoid() * x
        return (x * x).mean()


class Turned(nn.Module):
    """Linear layers, all but the first on an input that is not contiguous: they add their bias into
    the product."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(4, 16, 256)
        for layer in self.layers:
            x = layer(x).sin().transpose(0, 1)
        return x.sum()


class UserFunction(torch.autograd.Function):
    """Its backward adds by itself: an addition that is not the engine's."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1.0 + grad * 2.0


class WithUserFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(500, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        return (UserFunction.apply(h) + h.exp()).sum()


def real_requests(model: nn.Module, x: torch.Tensor) -> list[int]:
    """Sizes of every CPU allocation of one forward and backward, as PyTorch reports them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        model(x).backward()
    events = prof.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    return [event.nbytes() for event in memory if event.nbytes() > 0]


def captured_requests(make: Callable[[], nn.Module], x: torch.Tensor) -> list[int]:
    options = CaptureOptions(profile=find_profile("a100-80gb"))
    with CaptureSession(options, method="fake-cpu") as session:
        model = make()
        start = len(session.state.recorder.builder)
        model(x).backward()
        trace = session.trace()
    events = trace.events
    return [
        int(events.bytes[i]) for i in range(start, len(trace)) if events.kind[i] == EventKind.ALLOC
    ]


@pytest.mark.parametrize("make", [FanOut, SharedGradient, Residual, Turned, WithUserFunction])
def test_captured_requests_equal_real_ones(make: Callable[[], nn.Module]) -> None:
    width = next(make().parameters()).shape[1]
    x = torch.randn(64, width)
    small = 64  # scalars: the profiler does not see some of the engine's own
    real = [size for size in real_requests(make(), x) if size > small]
    captured = [size for size in captured_requests(make, x) if size > small]
    assert captured == real
