"""Steps of a training job, and the first one that the next one repeats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from memplan.phases.period import Repetition, find_repetitions
from memplan.phases.requests import (
    first_difference,
    is_steady,
    request_rows,
    request_signature,
)
from memplan.phases.spans import PhaseSpans, phase_spans
from memplan.types.trace import I64, EventKind, Phase, Trace


class Step(NamedTuple):
    """Events `[start, stop)`."""

    start: int
    stop: int


@dataclass(frozen=True)
class StepTable:
    """The complete optimizer steps of a trace, in order. What precedes the first (building the
    model) and what follows the last is in none."""

    trace: Trace
    start: I64
    stop: I64
    """Half-open ranges of events; each step begins where the one before ends."""
    steady: int | None
    """First step whose requests the next step repeats exactly; None when there is none."""
    reason: str
    """One sentence: how the steps were found, and why one is steady or none is."""
    inferred: bool
    """Whether the steps were inferred from repetition, for want of a step column."""

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, index: int) -> Step:
        return Step(int(self.start[index]), int(self.stop[index]))

    @cached_property
    def phases(self) -> PhaseSpans:
        """Forward, backward, optimizer and evaluation spans; none when steps were inferred."""
        count = 0 if self.inferred else len(self)
        return phase_spans(self.trace, self.start[:count], self.stop[:count])


def find_steps(trace: Trace) -> StepTable:
    """Cut a trace into optimizer steps.

    A captured trace says where they end. One imported without phases is cut by the longest
    repetition in its requests (of the device that makes most of them) that could be a training
    step: one that leaves as much memory in use as it found, and that reaches at least half of the
    trace's peak. It is cut at the point of its period where the least memory is in use.
    """
    if bool(np.any(trace.events.phase != Phase.SETUP)) or bool(np.any(trace.events.step)):
        return _from_columns(trace)
    return _from_repetition(trace)


def _from_columns(trace: Trace) -> StepTable:
    events = trace.events
    step = np.maximum.accumulate(events.step)
    complete = int(step[-1])
    edges = np.searchsorted(step, np.arange(complete + 1)).astype(np.int64)
    working = events.phase != Phase.SETUP
    edges[0] = max(int(edges[0]), int(working.argmax()) if working.any() else 0)
    edges = np.maximum.accumulate(edges)
    start, stop = edges[:-1], edges[1:]
    steady, reason = _find_steady(trace, start, stop)
    return StepTable(trace, start, stop, steady, f"{_count(complete)}; {reason}", inferred=False)


def _count(steps: int) -> str:
    return "1 complete step" if steps == 1 else f"{steps} complete steps"


def _find_steady(trace: Trace, start: I64, stop: I64) -> tuple[int | None, str]:
    """The first step that the next one repeats, and a reason in words."""
    ranges = list(zip(start.tolist(), stop.tolist(), strict=True))
    if len(ranges) < 2:
        return None, "no step is steady, for that takes two to compare"
    signatures = [request_signature(trace, *of_step) for of_step in ranges]
    for index, (a, b) in enumerate(pairwise(signatures)):
        if a == b and is_steady(trace, ranges[index], ranges[index + 1]):
            return index, f"step {index + 1} repeats the requests of step {index}"
    last = len(ranges) - 1
    difference = first_difference(trace, ranges[last - 1], ranges[last])
    return None, f"no step repeats the one before; steps {last - 1} and {last}: {difference}"


def _from_repetition(trace: Trace) -> StepTable:
    rows = request_rows(trace)
    if len(rows):
        devices, counts = np.unique(trace.events.device[rows], return_counts=True)
        rows = rows[trace.events.device[rows] == devices[counts.argmax()]]
    in_use = _in_use(trace, rows)
    repetitions = find_repetitions(_numbered(trace, rows)) if len(rows) else []
    found = next((r for r in repetitions if _may_be_step(in_use, r)), None)
    if found is None:
        none = np.zeros(0, np.int64)
        return StepTable(trace, none, none, None, _why_none(in_use, repetitions), inferred=True)
    first = _quietest(in_use, found)
    count = (found.stop - first) // found.period
    edges = [_begin(trace, rows, first + i * found.period) for i in range(count + 1)]
    reason = (
        f"the trace names no steps; {found.period} requests repeat {count} times "
        f"from event {edges[0]} to event {edges[-1]}"
    )
    table = np.array(edges, np.int64)
    return StepTable(trace, table[:-1], table[1:], 0, reason, inferred=True)


def _numbered(trace: Trace, rows: I64) -> I64:
    """A number for each request, equal for equal ones."""
    events = trace.events
    number = np.zeros(len(rows), np.int64)
    for column in (events.kind, events.bytes, events.stream):
        values, at = np.unique(column[rows], return_inverse=True)
        number = np.unique(number * len(values) + at, return_inverse=True)[1].astype(np.int64)
    return number


def _in_use(trace: Trace, rows: I64) -> I64:
    """Requested bytes in use before each request and after the last, against the first."""
    kind, nbytes = trace.events.kind[rows], trace.events.bytes[rows]
    change = np.where(kind == EventKind.ALLOC, nbytes, 0) - np.where(
        kind == EventKind.FREE, nbytes, 0
    )
    return np.concatenate(([0], np.cumsum(change)))


def _kept(in_use: I64, found: Repetition) -> int:
    """Bytes that one period leaves in use beyond those that it found."""
    return int(in_use[found.start + found.period] - in_use[found.start])


def _may_be_step(in_use: I64, found: Repetition) -> bool:
    least = int(in_use.min())
    reached = int(in_use[found.start : found.stop].max()) - least
    return not _kept(in_use, found) and 2 * reached >= int(in_use.max()) - least


def _why_none(in_use: I64, repetitions: list[Repetition]) -> str:
    if not repetitions:
        return "the trace names no steps, and its requests do not repeat"
    longest = repetitions[0]
    times = (longest.stop - longest.start) // longest.period
    kept = _kept(in_use, longest)
    why = f"keeps {kept} bytes each time" if kept else "stays far below the peak"
    return (
        "the trace names no steps, and none repeats: the longest repetition "
        f"({longest.period} requests, {times} times) {why}"
    )


def _quietest(in_use: I64, found: Repetition) -> int:
    """The request of the first period before which least memory is in use, as long as two whole
    periods still follow."""
    room = found.stop - found.start - 2 * found.period
    first = in_use[found.start : found.start + found.period]
    return found.start + int(first[: room + 1].argmin())


def _begin(trace: Trace, rows: I64, request: int) -> int:
    """First event of a step that begins with a request: what the allocator observed for it (the
    segments it took) included, the completion of earlier releases not."""
    if request == 0:
        return 0
    event = int(rows[request - 1]) + 1
    while event < len(trace) and trace.events.kind[event] == EventKind.FREE_COMPLETED:
        event += 1
    return event
