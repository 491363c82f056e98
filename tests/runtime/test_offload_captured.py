"""What a capture with offloaded values shows: the card's memory without them, the host's with
them, to the byte."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from memplan.estimation.host import host_memory
from memplan.phases import step_graph
from memplan.phases.passes import alive_after, step_passes
from memplan.recompute.selection import Selection, op_output, to_part
from memplan.recompute.transfers import Saves, Schedule
from memplan.runtime.apply import AppliedEverywhere
from memplan.simulate import AllocatorSettings
from memplan.types.plan import OffloadPart, OpOutput, RecomputePart
from memplan.types.step_graph import StepGraph
from memplan.types.trace import HostEventKind, Trace
from tests.capturing.jobs import record
from tests.phases.step_jobs import training
from tests.phases.test_droppable_applied import SEVERAL


@pytest.fixture(autouse=True)
def one_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are replayed have a workspace of cuBLASLt in backward's thread, too."""
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")


def droppable(graph: StepGraph) -> list[int]:
    """Last made first: about the order in which backward needs them."""
    return np.flatnonzero(graph.values.droppable).tolist()[::-1]


def offloaded(
    job: Callable[[], None], part: OffloadPart, recompute: RecomputePart | None = None
) -> Trace:
    notes: list[str] = []

    def applied() -> None:
        with AppliedEverywhere(recompute, notes.append, part):
            job()

    trace = record(applied)
    assert not notes
    return trace


def when_backward_begins(trace: Trace) -> int:
    alive = alive_after(trace)
    return max(int(alive[trace.ops.event[p.backward]]) for p in step_passes(trace).passes)


def peak(trace: Trace) -> int:
    found = step_passes(trace)
    return int(alive_after(trace)[found.start : found.stop + 1].max())


def on_host(trace: Trace) -> int:
    """The most bytes of storages on the host at once."""
    host = trace.host
    sign = (host.kind == HostEventKind.ALLOC).astype(int) - (host.kind == HostEventKind.FREE)
    return int(np.cumsum(sign * host.bytes).max(initial=0))


@pytest.mark.parametrize("job", SEVERAL.values(), ids=SEVERAL.keys())
def test_what_is_sent_is_on_the_host_and_not_on_the_card(job: Callable[[], None]) -> None:
    plain = record(job)
    graph = step_graph(plain)
    values = droppable(graph)
    sizes = graph.values.bytes[values].tolist()
    names = [op_output(graph, value) for value in values]
    planned = offloaded(job, OffloadPart(values=names, out_bytes=0, ahead_bytes=0))
    host = [host_memory(trace, AllocatorSettings()) for trace in (plain, planned)]
    assert [one.pinned for one in host if one is not None] == [0, sum(sizes)]
    released = when_backward_begins(plain) - when_backward_begins(planned)
    assert sum(sizes) - released in sizes  # the last one stays

    window = OffloadPart(values=names, out_bytes=sum(sizes), ahead_bytes=0)
    assert when_backward_begins(offloaded(job, window)) == when_backward_begins(plain)


@pytest.mark.parametrize("job", SEVERAL.values(), ids=SEVERAL.keys())
@pytest.mark.parametrize("recomputing", [False, True])
def test_a_capture_has_the_peak_that_the_planner_judged(
    job: Callable[[], None], recomputing: bool
) -> None:
    plain = record(job)
    graph = step_graph(plain)
    saves = Saves(graph, bytes_per_second=1e10)
    dropped = frozenset(saves.values[::2] if recomputing else ())
    schedule = Schedule(saves, Selection(tuple(frozenset({value}) for value in dropped)))
    sent = frozenset(saves.values) - dropped
    total = sum(saves.bytes[value] for value in sent)
    for window in (0, total // 10, total // 3):
        judged = schedule.judge(sent, window, window)
        part = OffloadPart(
            values=[op_output(graph, value) for value in schedule.order(sent)],
            out_bytes=window,
            ahead_bytes=window,
        )
        recompute = to_part(
            graph, schedule.selection, budget_bytes=0, peak_bytes=0, added_seconds=0.0
        )
        planned = offloaded(job, part, recompute if recomputing else None)
        assert peak(planned) == judged.peak_bytes
        assert judged.host_bytes <= on_host(planned) <= judged.host_bytes + on_host(plain)


def test_what_another_stream_makes_or_saves_stays() -> None:
    class Net(nn.Module):
        def __init__(self, side: bool) -> None:
            super().__init__()
            self.layer, self.side = nn.Linear(64, 64), side

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x).exp()
            stream = torch.cuda.Stream() if self.side else torch.cuda.current_stream()
            with torch.cuda.stream(stream):
                y = x.sigmoid()
            return y * x

    names = [OpOutput(f"aten.{name}.default", 0) for name in ("exp", "sigmoid")]
    part = OffloadPart(values=names, out_bytes=0, ahead_bytes=0)
    for side, away in ((False, 2), (True, 1)):
        job = training(lambda side=side: Net(side), (64, 64))  # type: ignore[misc]
        assert on_host(offloaded(job, part)) == away * 64 * 64 * 4
