"""Streams, events and what runs on them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from memplan.types.trace import EventKind, Phase, Trace
from tests.capturing.jobs import allocations, record

SIZE = 1000


def kinds(trace: Trace) -> list[EventKind]:
    moves = (EventKind.ALLOC, EventKind.FREE)
    return [event.kind for event in trace if event.kind not in moves]


def test_a_side_stream_owns_what_is_made_on_it() -> None:
    def job() -> None:
        side = torch.cuda.Stream()
        x = torch.ones(SIZE, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        y + 1

    trace = record(job)
    x, y, z = allocations(trace)
    assert (x.stream, z.stream) == (0, 0)
    assert y.stream > 0
    recorded = next(event for event in trace if event.kind == EventKind.RECORD_STREAM)
    assert (recorded.storage, recorded.stream) == (y.storage, 0)
    expected = [
        EventKind.EVENT_RECORD,
        EventKind.EVENT_WAIT,
        EventKind.EVENT_RECORD,
        EventKind.EVENT_WAIT,
        EventKind.RECORD_STREAM,
    ]
    assert kinds(trace) == expected


@pytest.mark.parametrize("called", [True, False])
def test_a_backward_operator_runs_where_its_forward_did(called: bool) -> None:
    """Whether or not a module of the job says that this is a forward pass."""

    def job() -> None:
        side = torch.cuda.Stream()
        module = torch.nn.Identity()
        module(torch.ones(SIZE))  # data: no forward pass yet
        x = torch.ones(SIZE, device="cuda", requires_grad=True)
        if called:
            module(x)
        with torch.cuda.stream(side):
            y = x.exp()
        (y * 2).sum().backward()

    trace = record(job)
    assert [event.phase for event in allocations(trace, op="exp")] == [
        Phase.FORWARD if called else Phase.SETUP
    ]
    backward = allocations(trace, Phase.BACKWARD, op="mul")
    streams = {event.stream for event in backward}
    assert len(streams) == 2
    assert 0 in streams


def test_a_hook_of_backward_may_change_the_stream() -> None:
    """What it makes there belongs to the stream that it chose; afterwards all is as before."""

    def job() -> None:
        side, forward = torch.cuda.Stream(), torch.cuda.Stream()
        module = torch.nn.Identity()
        x = torch.ones(SIZE, device="cuda", requires_grad=True)
        module(x)

        def hook(grad: torch.Tensor) -> None:
            with torch.cuda.stream(side):
                grad.cos()
            grad.sin()

        with torch.cuda.stream(forward):
            y = x.exp()
        y.register_hook(hook)
        (y * 2).sum().backward()

    trace = record(job)
    (chosen,) = allocations(trace, Phase.BACKWARD, op="cos")
    (kept,) = allocations(trace, Phase.BACKWARD, op="sin")
    (made,) = allocations(trace, op="exp")
    assert kept.stream == made.stream
    assert chosen.stream not in (0, kept.stream)


def test_streams_come_from_pools() -> None:
    """The 33rd stream is the first again, as on a real device; priorities have their own."""

    def job() -> None:
        streams = [torch.cuda.Stream() for _ in range(33)]
        assert streams[32] == streams[0] != streams[1]
        assert torch.cuda.Stream(priority=-1) not in streams
        assert torch.cuda.default_stream() == torch.cuda.current_stream()
        assert torch.cuda.default_stream() not in streams

    record(job)


def test_events_and_synchronisation() -> None:
    def job() -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.ones(SIZE, device="cuda")
        end.record()
        torch.cuda.synchronize()
        assert end.query()
        assert start.elapsed_time(end) > 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    expected = [
        EventKind.EVENT_RECORD,
        EventKind.EVENT_RECORD,
        EventKind.SYNCHRONIZE,
        EventKind.EMPTY_CACHE,
        EventKind.RESET_PEAK,
    ]
    assert kinds(record(job)) == expected


def test_a_thread_that_prefetches() -> None:
    def job() -> None:
        made: list[torch.Tensor] = []

        def prefetch() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                made.append(torch.ones(SIZE).pin_memory().to("cuda", non_blocking=True))

        thread = threading.Thread(target=prefetch)
        thread.start()
        thread.join()
        assert made[0].device == torch.device("cuda", 0)

    (event,) = allocations(record(job))
    assert event.bytes == 4 * SIZE


def test_threads_at_once_see_the_device() -> None:
    def job() -> None:
        with ThreadPoolExecutor(4) as pool:
            tensors = pool.map(lambda i: torch.ones(SIZE).cuda() + i, range(16))
            assert {tensor.device for tensor in tensors} == {torch.device("cuda", 0)}

    assert [event.bytes for event in allocations(record(job))] == [4 * SIZE] * 32
