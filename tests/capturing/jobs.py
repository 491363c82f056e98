"""Runs small programs under a capture and asks their traces simple questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from memplan.capturing.enough import EnoughSeen
from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.trace import EventKind, EventView, Phase, Provenance, Role, Trace


def record(
    job: Callable[[], object],
    *packages: str,
    routing: str = "balanced",
    steps: int | None = None,
    scan_seconds: float = 0.0,
) -> Trace:
    """The trace of a job on a fake A100."""
    options = CaptureOptions(
        profile=find_profile("a100-80gb"),
        steps=steps,
        scan_seconds=scan_seconds,
        packages=packages,
        routing="worst" if routing == "worst" else "balanced",
    )
    with CaptureSession(options) as session, suppress(EnoughSeen):
        job()
    return session.trace()


def operators(trace: Trace, phase: Phase | None = None) -> Counter[str]:
    """How often each operator ran, without `aten.` and overload."""
    rows = range(len(trace.ops)) if phase is None else np.flatnonzero(trace.ops.phase == phase)
    return Counter(trace.strings[trace.ops.name[row]].split(".")[1] for row in rows)


def allocations(trace: Trace, phase: Phase | None = None, op: str = "") -> list[EventView]:
    """What the script's own operators asked for; nothing that rules add."""
    return [
        event
        for event in trace
        if event.kind == EventKind.ALLOC
        and event.provenance == Provenance.OBSERVED
        and (phase is None or event.phase == phase)
        and op in event.op
    ]


def sizes(trace: Trace, phase: Phase | None = None, op: str = "") -> list[int]:
    return [event.bytes for event in allocations(trace, phase, op)]


def frees(trace: Trace) -> dict[int, int]:
    """Event index at which each storage was let go."""
    return {event.storage: event.index for event in trace if event.kind == EventKind.FREE}


def peak(trace: Trace) -> tuple[int, EventView]:
    """Most bytes observed alive at once, and the event that reached it."""
    live, best, at = 0, 0, 0
    for event in trace:
        if event.provenance != Provenance.OBSERVED:
            continue
        if event.kind == EventKind.ALLOC:
            live += event.bytes
        elif event.kind == EventKind.FREE:
            live -= event.bytes
        if live > best:
            best, at = live, event.index
    return best, trace.event(at)


def bytes_of(trace: Trace, role: Role) -> int:
    """Bytes of all storages of a role."""
    return sum(
        event.bytes
        for event in trace
        if event.kind == EventKind.ALLOC and trace.storages.role[event.storage] == role
    )


def assumed(trace: Trace) -> Iterator[str]:
    return (f"{item.kind}: {item.text}" for item in trace.meta.assumptions)
