"""Which captures are started, and how many at a time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from memplan.types.plan import OrderPart, Plan
from memplan.worker import pool
from memplan.worker.pool import Workers
from memplan.worker.request import CaptureRequest
from tests.worker.test_request import REQUEST


class Started:
    """Stands for a process; it has ended as soon as it began."""

    ended = True

    def __init__(self, request: CaptureRequest, path: Path, *, quiet: bool) -> None:
        self.request, self.path, self.quiet = request, path, quiet
        assert path.parent.is_dir() and path.name == f"{request.key()}.trace"

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_error: object) -> None:
        assert self.path.parent.is_dir(), "the folder goes last"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WorkerProcess", Started)
    monkeypatch.setattr("os.cpu_count", lambda: 8)


def test_a_request_is_captured_once() -> None:
    other = msgspec.structs.replace(
        REQUEST, plan=Plan(order=OrderPart(parameters=1, gradient_bytes=8))
    )
    with Workers() as workers:
        first = workers.start(REQUEST)
        assert workers.start(msgspec.structs.replace(REQUEST), quiet=True) is first
        second = workers.start(other)
        assert second is not first and workers.running == [first, second]
        assert [workers.next_ended(), workers.next_ended()] == [first, second]
        assert workers.start(REQUEST) is first and workers.running == []
    assert not first.path.parent.exists()


@pytest.mark.parametrize(("available", "room"), [(7 << 30, True), (5 << 30, False)])
def test_two_at_a_time_where_there_is_memory(
    available: int, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_available_bytes", lambda: available)
    with Workers() as workers:
        assert workers.has_room()
        workers.start(REQUEST)
        assert workers.has_room() is room
        workers.seen(1 << 30)
        assert workers.has_room()
        workers.start(msgspec.structs.replace(REQUEST, plan=None))
        assert not workers.has_room()
