"""Captures of one rank of a small job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from memplan.capturing.enough import EnoughSeen
from memplan.capturing.options import CaptureOptions, RankPlace
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.trace import EventKind, EventView, Provenance, Trace


def options(
    rank: int = 0, size: int = 2, local: int | None = None, **rest: object
) -> CaptureOptions:
    place = RankPlace(rank, size, size if local is None else local)
    return CaptureOptions(profile=find_profile("a100-80gb"), place=place, **rest)  # type: ignore[arg-type]


def join() -> None:
    """What a script does first."""
    import os

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")


def capture(
    job: Callable[[], object], rank: int = 0, size: int = 2, local: int | None = None
) -> Trace:
    """The trace of a job that joins its group by itself."""
    with CaptureSession(options(rank, size, local)) as session, suppress(EnoughSeen):
        job()
    return session.trace()


def requests(trace: Trace, start: int = 0) -> list[EventView]:
    """What the job asked for from event `start` on, without what rules add."""
    return [
        event
        for event in trace
        if event.index >= start
        and event.kind == EventKind.ALLOC
        and event.provenance == Provenance.OBSERVED
    ]


def second_step(
    make: Callable[[str], Callable[[], object]], rank: int, size: int, small: int
) -> tuple[Trace, list[int]]:
    """The trace of two steps of a job that is made for a device, and the sizes that the second one
    asks for, those above `small` bytes."""
    with CaptureSession(options(rank, size, steps=10)) as session:
        join()
        step = make("cuda")
        step()
        start = len(session.state.recorder.builder)
        step()
        trace = session.trace()
    return trace, [event.bytes for event in requests(trace, start) if event.bytes > small]
