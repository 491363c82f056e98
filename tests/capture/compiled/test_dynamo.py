"""What can be done with `torch.compile` besides compiling a model, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._inductor.graph import GraphLowering
from torch.profiler import ProfilerActivity, profile

from memplan.capture.options import CaptureOptions
from memplan.capture.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.trace import EventKind, Phase
from tests.capture.compiled.test_inductor import ROWS, WIDTH, Mlp, kernels, train
from tests.capture.jobs import assumed, operators, record, sizes

_SMALL = 64
"""Scalars: the profiler does not see some of the engine's own."""


class Residual(nn.Module):
    """A tied weight, additions that fan in, and a scalar for a result."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self.down(torch.relu(self.up(x))) * x.sigmoid()
        return (x * x).mean()


def real_requests(step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[int]:
    """Sizes of all CPU allocations of a forward and backward, as PyTorch reports them."""
    step(x).backward()  # compiles
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step(x).backward()
    events = prof.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    return [event.nbytes() for event in memory if event.nbytes() > _SMALL]


def captured_requests(make: Callable[[], nn.Module], backend: str) -> list[int]:
    options = CaptureOptions(profile=find_profile("a100-80gb"))
    with CaptureSession(options, method="fake-cpu") as session:
        model = make()
        step = torch.compile(model, backend=backend)
        x = nn.Parameter(torch.zeros(ROWS, WIDTH), requires_grad=False)  # fake, on the host too
        step(x).backward()
        start = len(session.mode.recorder.builder)
        step(x).backward()
        trace = session.trace()
    return [
        event.bytes
        for event in trace
        if event.index >= start and event.kind == EventKind.ALLOC and event.bytes > _SMALL
    ]


def test_requests_of_aot_eager_are_those_of_a_real_run() -> None:
    model = Residual()
    real = real_requests(torch.compile(model, backend="aot_eager"), torch.zeros(ROWS, WIDTH))
    torch._dynamo.reset()
    assert captured_requests(Residual, "aot_eager") == real
    assert real != real_requests(model, torch.zeros(ROWS, WIDTH))  # another job than eager


def test_backend_eager_is_eager() -> None:
    def job(compiled: bool) -> Callable[[], None]:
        def run() -> None:
            model = Mlp().cuda()
            train(torch.compile(model, backend="eager") if compiled else model, model)

        return run

    assert sizes(record(job(True))) == sizes(record(job(False)))


def in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


def by_block(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return nn.Sequential(compiled)


def with_a_break(model: nn.Module) -> nn.Module:
    forward = model.forward

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = forward(x) * 2
        torch._dynamo.graph_break()
        return y.exp() + 1

    model.forward = broken
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return compiled


@pytest.mark.parametrize("wrap", [in_place, by_block, with_a_break])
def test_models_are_compiled_however_it_is_asked_for(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    def job() -> None:
        model = Mlp().cuda()
        train(wrap(model), model)

    trace = record(job)
    assert kernels(trace)
    assert operators(trace)["gelu"] == 0
    assert not list(assumed(trace))


def test_a_graph_that_cannot_be_compiled_here_runs_as_eager_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_lowering: GraphLowering) -> None:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(GraphLowering, "codegen", refuse)

    def job(compiled: bool) -> Callable[[], None]:
        def run() -> None:
            model = Mlp().cuda()
            train(torch.compile(model) if compiled else model, model)

        return run

    trace = record(job(True))
    (text,) = assumed(trace)
    assert "could not be compiled here" in text and "no such kernel" in text
    assert sizes(trace, Phase.BACKWARD) == sizes(record(job(False)), Phase.BACKWARD)


def test_nothing_of_it_stays_in_the_process() -> None:
    from torch._inductor import compile_fx

    watched: list[tuple[object, str]] = [
        (torch, "compile"),
        (nn.Module, "__call__"),
        (GraphLowering, "compile_to_module"),
        (compile_fx, "compile_fx"),
        (compile_fx, "cudagraphify"),
    ]
    before = [getattr(owner, name) for owner, name in watched]
    record(lambda: torch.compile(lambda x: x + 1)(torch.ones(4, device="cuda")))
    assert [getattr(owner, name) for owner, name in watched] == before
    assert torch.equal(
        torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2)), 1 + torch.ones(2)
    )
