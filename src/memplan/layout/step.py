"""The requests of a steady step, one row for each allocation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.layout.dynamic import Bools, data_dependent, matched
from memplan.layout.streams import NEVER, Lifetimes, lifetimes
from memplan.phases.steps import StepTable, find_steps
from memplan.types.errors import NoAnswerError
from memplan.types.trace import I64, EventKind, Phase, Trace


@dataclass(frozen=True)
class StepRequests:
    """The requests of a steady step for one device. Moments count the trace's events from the first
    one of the step, which repeats every `clock` events."""

    trace: Trace
    device: int
    step: int
    start: int
    clock: int
    storage: I64
    bytes: I64
    stream: I64
    alloc: I64
    """The moment of the request itself, in `[0, clock)`."""
    lower: I64
    upper: I64
    """The memory is in use over `[lower, upper)`, for all streams. This may begin before 0 or end
    after `clock`, in another step; it ends far behind `clock` where reuse is never known to be
    safe."""
    kept: Bools
    """Whether it is never released as far as the trace tells, so that each step adds one."""
    dynamic: Bools
    """Whether its size depends on data."""
    phase_start: I64
    """Index in `phases` of the phase of its allocation."""
    phases: list[str]
    """Phases of the step, in order."""
    lifetimes: Lifetimes
    """Lifetimes of all storages of the trace on this device."""
    data_dependent: Bools
    """As `dynamic`, with a row for each storage of the trace."""

    def __len__(self) -> int:
        return len(self.bytes)


def step_requests(trace: Trace, device: int | None = None) -> StepRequests:
    """The requests of the first steady step. If no step is steady, those of the last complete step
    but one; requests that its successor does not repeat are marked as dynamic. `device`: by default
    the one with the most requests.

    Raises NoAnswerError for a trace without a complete step, or without requests in it.
    """
    table = find_steps(trace)
    if not len(table):
        raise NoAnswerError(
            "no step to plan: the trace has no complete one",
            "capture more steps: memplan estimate --steps 4 -o",
        )
    step = max(len(table) - 2, 0) if table.steady is None else table.steady
    start, stop = table[step]
    events = trace.events
    asked = np.flatnonzero((events.kind == EventKind.ALLOC) & (events.bytes > 0))
    inside = asked[(asked >= start) & (asked < stop)]
    if device is not None:
        inside = inside[events.device[inside] == device]
    if not len(inside):
        raise NoAnswerError("the step to plan asks for no memory", "capture a training job")
    devices, counts = np.unique(events.device[inside], return_counts=True)
    device = int(devices[counts.argmax()])
    rows = inside[events.device[inside] == device]
    storage = events.storage[rows]
    life = lifetimes(trace, device)
    end = life.end[storage]
    data = data_dependent(trace)
    dynamic = data[storage] | _differs(trace, table, step, rows)
    names, phase_of = _phases(table, step, stop - start)
    clock = stop - start
    return StepRequests(
        trace=trace,
        device=device,
        step=step,
        start=start,
        clock=clock,
        storage=storage,
        bytes=events.bytes[rows],
        stream=events.stream[rows].astype(np.int64),
        alloc=rows - start,
        lower=life.begin[storage] - start,
        upper=end - start,
        kept=end == NEVER,
        dynamic=dynamic,
        phase_start=phase_of[rows - start],
        phases=names,
        lifetimes=life,
        data_dependent=data,
    )


def _differs(trace: Trace, table: StepTable, step: int, rows: I64) -> Bools:
    """Which requests the next step does not repeat; none where there is no such step."""
    if table.steady is not None or step + 1 >= len(table):
        return np.zeros(len(rows), np.bool_)
    events = trace.events
    start, stop = table[step + 1]
    later = np.flatnonzero(events.kind[start:stop] == EventKind.ALLOC) + start
    later = later[(events.device[later] == events.device[rows[0]]) & (events.bytes[later] > 0)]
    both = np.concatenate((rows, later))
    key = events.bytes[both] * 1024 + events.stream[both] % 1024
    return ~matched(key[: len(rows)], key[len(rows) :])


def _phases(table: StepTable, step: int, clock: int) -> tuple[list[str], I64]:
    """Names of the step's phases in order, and the index of the phase of each moment."""
    of_moment = np.zeros(clock, np.int64)
    spans = table.phases
    names: list[str] = []
    start = table[step].start
    for row in np.flatnonzero(spans.step == step).tolist():
        lower, upper = int(spans.start[row]) - start, int(spans.stop[row]) - start
        of_moment[lower:upper] = len(names)
        phase = Phase(int(spans.phase[row])).name.lower()
        names.append(f"{phase} {int(spans.micro_batch[row])}")
    return names or ["step"], of_moment
