"""Replays a trace through a plan, as the planned allocator would serve it.

The rules are native (`native/planned/arena.hpp`), the same code that serves a running job, one
request after the other. A request that is the plan's next one gets its planned address. Where the
job differs from the plan, the current position in the plan is searched for. An unforeseen request
gets addresses that the plan leaves free for as long as the request may live. All others go to a
caching allocator beside the arena.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum

import numpy as np

import memplan._native as _native
from memplan.layout.streams import lifetimes
from memplan.phases.steps import find_steps
from memplan.simulate import AllocatorSettings, Timeline, simulate
from memplan.types.allocation import Requests, native_columns
from memplan.types.errors import FormatError
from memplan.types.plan import AllocationPart
from memplan.types.trace import I64, EventKind, Phase, Trace

_EXPANDABLE = AllocatorSettings(expandable_segments=True)
_PAGE = 2 << 20
"""The arena is mapped in pages of this size."""


class Kind(IntEnum):
    """How a request was served; the numbers are those of `native/planned/arena.hpp`."""

    MISSED = 0
    PLANNED = 1
    DYNAMIC = 2
    ADOPTED = 3


class _Action(IntEnum):
    REQUEST = 0
    RELEASE = 1
    PHASE = 2


@dataclass(frozen=True)
class Served:
    """How the requests of a trace were served. Columns have a row for each storage."""

    offset: I64
    """Offset in the arena, in bytes; -1 for what PyTorch's allocator served."""
    kind: I64
    """A `Kind`; MISSED also for a storage that was never requested."""
    planned: int
    """Number of requests that got their planned address."""
    dynamic: int
    """Number of requests that went into a reusable space."""
    adopted: int
    """Number of unforeseen requests that went where the plan leaves room."""
    missed: int
    """Number of requests left to PyTorch's allocator."""
    resyncs: int
    """How often the position in the plan was lost and found again."""


def serve(trace: Trace, part: AllocationPart, requests: Requests) -> Served:
    """Serve the requests of a trace by a plan, one by one.

    Raises FormatError for a plan that is not valid.
    """
    action, value, stream, asked = _operations(trace, part)
    offset, kind = np.empty(len(action), np.int64), np.empty(len(action), np.int64)
    names = ("requests", "setup", "start", "clock", "arena_bytes")
    numbers = {name: int(getattr(part, name)) for name in names}
    numbers |= {"phases": len(part.phases), "spaces": len(part.spaces)}
    columns = native_columns(part, requests)
    try:
        counters = _native.serve(numbers, columns, action, value, stream, offset, kind)
    except ValueError as error:
        raise FormatError(f"its allocation part is no plan: {error}") from error
    storages = trace.events.storage[asked]
    placed = np.full(len(trace.storages), -1, np.int64)
    how = np.full(len(trace.storages), Kind.MISSED, np.int64)
    placed[storages] = offset[action == _Action.REQUEST]
    how[storages] = kind[action == _Action.REQUEST]
    return Served(
        offset=placed,
        kind=how,
        planned=counters["hits"],
        dynamic=counters["dynamic"],
        adopted=counters["adopted"],
        missed=counters["misses"],
        resyncs=counters["resyncs"],
    )


def timeline_under(trace: Trace, part: AllocationPart, requests: Requests) -> Timeline:
    """Reserved bytes after each event of a job under a plan.

    The whole arena counts as reserved from the start; what the plan does not serve is replayed with
    expandable segments beside it. In truth a plan needs no more: it maps the arena's pages when
    they are needed, and serves other requests from what is free there. Raises FormatError for a
    plan that is not valid.
    """
    served, events = serve(trace, part, requests), trace.events
    left = ~((events.storage >= 0) & (served.offset[events.storage] >= 0))
    columns = {field.name: getattr(events, field.name)[left] for field in fields(events)}
    rest = simulate(replace(trace, events=type(events)(**columns)), _EXPANDABLE)
    beside = np.concatenate(([rest.start_reserved_bytes], rest.reserved))[np.cumsum(left)]
    whole = simulate(trace, _EXPANDABLE)
    arena = -(-part.arena_bytes // _PAGE) * _PAGE
    return replace(whole, reserved=beside + arena)


def _operations(trace: Trace, part: AllocationPart) -> tuple[I64, I64, I64, I64]:
    """Requests, releases and phases in order, as columns `action`, `value` and `stream`; and the
    events of the requests. Memory that other streams use is released when they are done with it."""
    events = trace.events
    asked = np.flatnonzero((events.kind == EventKind.ALLOC) & (events.bytes > 0))
    asked = asked[events.device[asked] == part.device]
    ends = lifetimes(trace, part.device).end[events.storage[asked]]
    released = np.flatnonzero(ends < len(trace))
    starts, phases = phase_entries(trace, part.phases)
    count = len(asked)
    # At one moment, releases come before a phase, and a phase before its first request.
    moment = np.concatenate((3 * asked + 2, 3 * ends[released], 3 * starts + 1))
    order = np.argsort(moment, kind="stable")
    lengths = (count, len(released), len(starts))
    action = np.repeat(np.array(_Action), lengths)[order]
    row = np.empty(count, np.int64)
    row[order[action == _Action.REQUEST]] = np.flatnonzero(action == _Action.REQUEST)
    value = np.concatenate((events.bytes[asked], row[released], phases))[order]
    stream = np.zeros(len(order), np.int64)
    number = {0: 0}
    streams = (number.setdefault(s, len(number)) for s in events.stream[asked].tolist())
    stream[action == _Action.REQUEST] = np.fromiter(streams, np.int64, count)
    return action.astype(np.int64), value, stream, asked


def phase_entries(trace: Trace, names: list[str]) -> tuple[I64, I64]:
    """Events at which the job enters a phase, and its index in `phases`; -1 for an evaluation."""
    spans = find_steps(trace).phases
    starts, numbers = [], []
    for row in range(len(spans)):
        phase = Phase(int(spans.phase[row]))
        name = f"{phase.name.lower()} {int(spans.micro_batch[row])}"
        if phase == Phase.EVALUATION or (name in names and phase not in (Phase.SETUP, Phase.OTHER)):
            starts.append(int(spans.start[row]))
            numbers.append(names.index(name) if name in names else -1)
    return np.array(starts, np.int64), np.array(numbers, np.int64)
