"""Copies that happen as late as the events allow: whatever is not waited for has not happened.

There is no card here. The computing runs at once, as on a stream that the host keeps up with; a
copy stands in its stream's queue until somebody waits for an event behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import memplan.runtime.tape.offload as offload
from memplan.runtime import streams
from memplan.types.errors import OffloadError
from tests.runtime import test_calls, test_in_place, test_offload
from tests.runtime.harness import Job, check, same_bits
from tests.runtime.test_memory import ROWS, WIDTH, Chain
from tests.runtime.test_offload import applied, steps

preserve_version: Any = torch.autograd.__dict__["_unsafe_preserve_version_counter"]
copy = torch.ops.aten.copy_.default


class Event:
    """Behind so much of a stream's queue."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.place = stream, stream.issued

    def happen(self) -> None:
        while self.stream.done < self.place:
            self.stream.done += 1
            self.stream.queue.pop(0)()

    synchronize = happen


class Stream:
    def __init__(self, *, late: bool = True) -> None:
        self.late = late
        self.queue: list[Callable[[], object]] = []
        self.issued = self.done = 0

    def issue(self, work: Callable[[], object]) -> None:
        if not self.late:
            work()
            return
        self.queue.append(work)
        self.issued += 1

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.issue(event.happen)


class Late(TorchDispatchMode):
    """Puts copies into a stream's queue."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not copy:
            return func(*args, **(kwargs or {}))
        to, source = args[0], args[1]

        def work() -> None:
            with torch.no_grad(), preserve_version(to):
                to.copy_(source)

        self.stream.issue(work)
        return to


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The streams of copies."""
    computing = Stream(late=False)
    copying: list[Stream] = []

    def new_stream(_device: torch.device) -> Stream:
        copying.append(Stream())
        return copying[-1]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        if not stream.late:
            yield
            return
        with Late(stream):
            yield

    monkeypatch.setattr(streams, "new", new_stream)
    monkeypatch.setattr(streams, "current", lambda _device: computing)
    monkeypatch.setattr(streams, "on", on)
    return copying


sent = offload.Lane.sent


def same_as_plain(out: int, ahead: int, **options: Any) -> bool:
    model, batches = Chain(), [torch.randn(ROWS, WIDTH) for _ in range(3)]
    plain = [steps(model, x, 1) for x in batches]
    with applied(out, ahead, **options):
        found = [steps(model, x, 1) for x in batches]
    return all(all(map(same_bits, *pair)) for pair in zip(plain, found, strict=True))


@pytest.mark.parametrize("out", [0, 1, 3, 9])
@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
def test_every_copy_is_waited_for(out: int, ahead: int) -> None:
    assert same_as_plain(out, ahead)


@pytest.mark.parametrize("missing", ["out", "back"])
def test_a_wait_less_would_be_noticed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the checksums of the first pass."""
    wait = streams.wait
    lanes: list[offload.Lane] = []

    def noted(lane: offload.Lane, value: Any, nbytes: int) -> None:
        lanes.append(lane)
        sent(lane, value, nbytes)

    monkeypatch.setattr(offload.Lane, "sent", noted)

    def wait_less(stream: Any, event: Any) -> None:
        skipped = event is not None and any(event.stream is getattr(o, missing) for o in lanes)
        if stream.late or not skipped:
            wait(stream, event)

    monkeypatch.setattr(streams, "wait", wait_less)
    with pytest.raises(OffloadError, match="other values than it had"):
        same_as_plain(0, 0)


@pytest.mark.parametrize("write", [*test_in_place.WRITES, *test_in_place.TO_BUFFERS])
def test_writes(write: str) -> None:
    made = {**test_in_place.WRITES, **test_in_place.TO_BUFFERS}[write]
    check(Job(lambda: test_in_place.Net(made), test_in_place.step))


@pytest.mark.parametrize("step", test_calls.STEPS, ids=[s.__name__ for s in test_calls.STEPS])
def test_calls_in_a_step(step: Any) -> None:
    check(Job(test_calls.Siamese, step))


@pytest.mark.parametrize(
    "test",
    [
        test_offload.test_a_second_backward_through_a_retained_graph,
        test_offload.test_forwards_before_and_between_backwards,
        test_offload.test_a_recomputation_fetches_what_it_reads,
        test_offload.test_a_write_that_no_version_shows_is_seen_by_backward_as_ever,
        test_offload.test_several_views_are_copied_once_and_parameters_never,
    ],
    ids=lambda test: test.__name__,
)
def test_with_late_copies(test: Callable[[], None], late: list[Stream]) -> None:
    test()
    assert any(stream.done for stream in late)
