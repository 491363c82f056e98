"""Formulas of derivatives write into what they have made, as they do without a capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.profiler import ProfilerActivity, profile

from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.trace import EventKind, Provenance, Trace

ROWS, COLUMNS = 48, 320
WHOLE = 4 * ROWS * COLUMNS
Job = Callable[[torch.Tensor], torch.Tensor]


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(8, dtype=torch.long, device=x.device)


JOBS: dict[str, Job] = {
    "gather": lambda x: x.gather(1, torch.ones(ROWS, 1, dtype=torch.long, device=x.device)),
    "topk": lambda x: x.topk(3)[0],
    "sort": lambda x: x.sort()[0],
    "max": lambda x: x.max(1)[0],
    "rows": lambda x: x[_rows(x)],
    "mask": lambda x: x[torch.ones(ROWS, dtype=torch.bool, device=x.device)],
    "index_select": lambda x: x.index_select(0, _rows(x)),
    "logits": lambda x: binary_cross_entropy_with_logits(x, torch.ones_like(x)),
}


def _backward(job: Job, device: str) -> Callable[[], None]:
    leaf = torch.ones(ROWS, COLUMNS, device=device, requires_grad=True)
    out = job(leaf).sum()

    def run() -> None:
        out.backward()

    return run


def _captured(job: Job) -> int:
    """How often a backward asks for the input's size."""
    with CaptureSession(CaptureOptions(profile=find_profile("a100-80gb"))) as session:
        run = _backward(job, "cuda")
        start = len(session.state.recorder.builder)
        run()
        trace = session.trace()
    return sum(bytes_ == WHOLE for bytes_ in _requests(trace, start))


def _requests(trace: Trace, start: int = 0) -> list[int]:
    return [
        event.bytes
        for event in trace
        if event.index >= start
        and event.kind == EventKind.ALLOC
        and event.provenance == Provenance.OBSERVED
    ]


@pytest.mark.parametrize("name", JOBS)
def test_the_backward_asks_for_what_it_really_does(name: str) -> None:
    run = _backward(JOBS[name], "cpu")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = prof.profiler.kineto_results.events()
    real = sum(event.name() == "[memory]" and event.nbytes() == WHOLE for event in events)
    assert _captured(JOBS[name]) == real == 1


def test_a_backward_of_one_s_own_asks_for_what_it_says() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            rows = torch.ones(ROWS, 1, dtype=torch.long, device=grad.device)
            return torch.zeros(ROWS, COLUMNS, device=grad.device).scatter_add(1, rows, grad[:, :1])

    assert _captured(Own.apply) == 2


def test_a_mask_and_a_number_are_a_fill() -> None:
    """No positions are made of the mask, and nothing has to be assumed about it."""
    with CaptureSession(CaptureOptions(profile=find_profile("a100-80gb"))) as session:
        x = torch.empty(ROWS, COLUMNS, device="cuda")
        x[x > 0] = 1.0
        x[:, x[0] > 0] = 2.0
        x[x[:, 0] > 0] = torch.tensor(3.0)
        torch.index_put(x, [x[:, 0] > 0], torch.tensor(4.0))
        trace = session.trace()
    masks = [ROWS * COLUMNS, COLUMNS, ROWS, ROWS]
    assert _requests(trace) == [WHOLE, *masks, WHOLE]
    assert trace.meta.assumptions == []
