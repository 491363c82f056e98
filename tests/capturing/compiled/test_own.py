"""memplan's own compiled regions and steps under a capture: what they ask for in a real run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import memplan
from memplan.capturing.job.caught import memplan_cause
from memplan.types.errors import InfeasibleError
from memplan.types.trace import Phase
from tests.capturing.jobs import allocations, assumed, record, sizes

ROWS, WIDTH = 64, 48
MARK = 12_345
_SMALL = 64
"""Scalars: the profiler does not see some of the engine's own."""


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.down(torch.nn.functional.gelu(self.up(x))) * x.sigmoid()
        return (x * x).mean()


def region(model: nn.Module) -> Callable[[Tensor], object]:
    options: Any = {"codegen": "eager", "budget": "least", "deadline_seconds": 60.0}
    run: Any = torch.compile(model, backend="memplan", dynamic=False, options=options)
    return lambda x: run(x).backward()


def step(model: nn.Module) -> Callable[[Tensor], object]:
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    return memplan.compile(lambda x: model(x), optimizer=optimizer, order=False)


@pytest.mark.parametrize("make", [region, step])
def test_requests_are_those_of_a_real_run(make: Callable[[nn.Module], Any]) -> None:
    torch._dynamo.reset()
    run, x = make(Residual()), torch.zeros(ROWS, WIDTH)
    for _ in range(2):
        run(x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run(x)
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    on_host = torch.get_rng_state().nbytes  # the generator's state, which each step keeps
    real = [event.nbytes() for event in events if event.nbytes() > _SMALL]
    torch._dynamo.reset()

    def job() -> None:
        run, x = make(Residual().cuda()), torch.zeros(ROWS, WIDTH, device="cuda")
        for _ in range(2):
            run(x)
        torch.zeros(MARK, device="cuda", dtype=torch.uint8)
        run(x)

    trace = record(job, steps=9)
    found = sizes(trace)
    captured = [nbytes for nbytes in found[found.index(MARK) + 1 :] if nbytes > _SMALL]
    assert captured == [nbytes for nbytes in real if nbytes != on_host]
    assert not [text for text in assumed(trace) if text.startswith("compile")]


def test_a_compiled_step_is_one_step_with_its_phases_and_modules() -> None:
    def job() -> None:
        model = Residual().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = memplan.compile(lambda x: model(x), optimizer=optimizer, deadline_seconds=0.5)
        for _ in range(5):
            run(torch.randn(ROWS, WIDTH, device="cuda"))

    trace = record(job)
    assert trace.meta.optimizer_steps == 3  # the last was like the one before
    phases = {event.phase for event in allocations(trace) if event.step == 2}
    assert {Phase.FORWARD, Phase.BACKWARD} <= phases
    forward = allocations(trace, Phase.FORWARD, "addmm")
    assert {event.source.rpartition("/")[2].partition(":")[0] for event in forward} == {
        "test_own.py"
    }


def test_a_budget_that_cannot_be_met_is_said() -> None:
    def job() -> None:
        model = Residual().cuda()
        options: Any = {"codegen": "eager", "budget": 1024, "deadline_seconds": 0.5}
        run = torch.compile(model, backend="memplan", dynamic=False, options=options)
        run(torch.randn(ROWS, WIDTH, device="cuda")).backward()

    with pytest.raises(InfeasibleError) as failed:
        record(job)
    cause = memplan_cause(failed.value)
    assert isinstance(cause, InfeasibleError)
    assert "the least found is" in cause.message


def test_random_numbers_that_a_checkpoint_draws_again() -> None:
    def job() -> None:
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).cuda()

        def run(x: Tensor) -> Tensor:
            return checkpoint(block, x, use_reentrant=False).sum()

        options: Any = {"codegen": "eager", "deadline_seconds": 0.5}
        fast = torch.compile(run, backend="memplan", dynamic=False, options=options)
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        for _ in range(3):
            fast(torch.randn(ROWS, WIDTH, device="cuda")).backward()
            optimizer.step()

    trace = record(job)
    assert allocations(trace, Phase.BACKWARD, "dropout")
    assert not [text for text in assumed(trace) if text.startswith("compile")]
