"""Which captures are started, and how many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from memplan.types.plan import OrderPart, Plan
from memplan.worker import pool
from memplan.worker.pool import Workers
from memplan.worker.request import CaptureRequest
from tests.worker.test_request import REQUEST


class Started:
    """Stands for a process; it has ended as soon as somebody waits for it."""

    def __init__(self, request: CaptureRequest | None, path: Path, *, quiet: bool) -> None:
        self.request, self.path, self.quiet = request, path, quiet
        self.ended = self.dismissed = False
        assert path.parent.is_dir()
        assert request is None or path.name == f"{request.key()}.trace"

    def ask(self, request: CaptureRequest) -> None:
        self.request = request

    def dismiss(self) -> None:
        self.dismissed = True


def first_to_end(running: Sequence[Started]) -> Started:
    running[0].ended = True
    return running[0]


def end_all(started: Sequence[Started]) -> None:
    assert all(one.path.parent.is_dir() for one in started), "the folder goes last"


def with_plan(parameters: int) -> CaptureRequest:
    order = OrderPart(parameters=parameters, gradient_bytes=8)
    return msgspec.structs.replace(REQUEST, plan=Plan(order=order))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WorkerProcess", Started)
    monkeypatch.setattr(pool, "wait_for_any", first_to_end)
    monkeypatch.setattr(pool, "end_all", end_all)
    monkeypatch.setattr(pool, "available_bytes", lambda: 1 << 40)
    monkeypatch.setattr("os.cpu_count", lambda: 8)


def test_a_request_is_captured_once() -> None:
    other = with_plan(1)
    with Workers() as workers:
        first = workers.start(REQUEST)
        assert workers.start(msgspec.structs.replace(REQUEST), quiet=True) is first
        second = workers.start(other)
        assert second is not first and workers.running == [first, second]
        assert [workers.next_ended(), workers.next_ended()] == [first, second]
        assert workers.start(REQUEST) is first and workers.running == []
    assert not first.path.parent.exists()


def test_as_many_as_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    available = 7 << 30
    monkeypatch.setattr(pool, "available_bytes", lambda: available)
    with Workers() as workers:
        assert workers.has_room()
        workers.start(REQUEST)
        assert workers.has_room()
        available = 5 << 30
        assert not workers.has_room()
        workers.seen(1 << 30)
        assert workers.has_room()
        monkeypatch.setattr("os.cpu_count", lambda: 1)
        assert not workers.has_room()


def test_what_is_asked_for_ahead_begins_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with Workers() as workers:
        asked = [with_plan(number) for number in range(4)]
        assert [workers.ahead(request) for request in asked] == [None] * 4
        assert [one.request for one in workers.running] == asked[:2]  # type: ignore[attr-defined]
        wanted = workers.ended(asked[3])
        assert wanted.ended and wanted.request == asked[3]  # type: ignore[attr-defined]
        assert workers.ahead(asked[3]) is wanted
        begun = [one.request for one in workers.running]  # type: ignore[attr-defined]
        assert begun == [asked[2]], "it took the place of one that has ended"
        assert workers.ended(asked[0]).quiet  # type: ignore[attr-defined]


def test_those_that_wait_are_asked_first() -> None:
    with Workers() as workers:
        workers.get_ready()
        first, second = ready = list(workers._ready)
        asked = workers.start(REQUEST, quiet=False)
        assert asked not in ready, "what it writes is to be seen"
        first.ended = True  # type: ignore[misc]
        assert workers.start(with_plan(1), quiet=True) is second
        assert second in workers.running and first.dismissed  # type: ignore[attr-defined]
        workers.get_ready()
        left = list(workers._ready)
        assert len({one.path for one in (*ready, *left)}) == 4
    assert all(one.dismissed for one in left)  # type: ignore[attr-defined]
