"""When a step's operators end: a max-plus system of the host and its streams.

An operator begins when the host has launched it and its stream has done what came before. A run of
operators on one stream, with nothing to wait for in between, ends at the largest of: the stream's
clock and all that they take; and for each of them, its launch and all that it and the later ones
take. That is one running maximum, so only where streams meet is there a step of Python.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from memplan.types.step_graph import F64
from memplan.types.trace import I32, EventKind, Trace

_MEETINGS = (EventKind.EVENT_RECORD, EventKind.EVENT_WAIT, EventKind.SYNCHRONIZE)


@dataclass
class _Clocks:
    host: float = 0.0
    stream: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    event: dict[int, float] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return max([self.host, *self.stream.values()])


@dataclass(frozen=True)
class SteadyRun:
    """One run of a step's operators behind another one. Seconds."""

    seconds: float
    """Seconds from the end of the run before to the end of this one."""
    ends: F64
    """When each operator ends on its stream, counted from the beginning of the run before."""


def steady_run(trace: Trace, start: int, stop: int, device: F64, host: F64) -> SteadyRun:
    """The operators `[start, stop)`, run twice, where the host may run ahead. `device` and `host`
    are seconds of each of these operators."""
    ops, events = trace.ops, trace.events
    first = int(ops.event[start])
    last = int(ops.event[stop]) if stop < len(ops) else len(events)
    rows = first + np.flatnonzero(np.isin(events.kind[first:last], _MEETINGS))
    meetings = list(
        zip(
            np.searchsorted(ops.event[start:stop], rows, "right").tolist(),
            events.kind[rows].tolist(),
            events.stream[rows].tolist(),
            events.aux[rows].tolist(),
            strict=True,
        )
    )
    stream = ops.stream[start:stop]
    turns = (1 + np.flatnonzero(stream[1:] != stream[:-1])).tolist()
    cuts = sorted({0, stop - start, *turns, *(place for place, *_ in meetings)})
    launched = np.concatenate(([0.0], np.cumsum(host)))
    done = np.concatenate(([0.0], np.cumsum(device)))
    clocks = _Clocks()
    before = 0.0
    ends = np.zeros(stop - start)
    for _ in range(2):
        before = clocks.end
        _one_run(clocks, cuts, meetings, stream, launched, done, ends)
    return SteadyRun(float(clocks.end - before), ends)


def _one_run(
    clocks: _Clocks,
    cuts: list[int],
    meetings: list[tuple[int, int, int, int]],
    stream: I32,
    launched: F64,
    done: F64,
    ends: F64,
) -> None:
    waiting = iter([*meetings, (len(done), -1, 0, 0)])
    meeting = next(waiting)
    for begin, end in zip(cuts, [*cuts[1:], cuts[-1]], strict=True):
        while meeting[0] <= begin:
            _meet(clocks, *meeting[1:])
            meeting = next(waiting)
        if begin == end:
            continue
        on = int(stream[begin])
        base = clocks.host - launched[begin]
        launch = base + launched[begin + 1 : end + 1]
        waits = np.maximum.accumulate(launch - done[begin:end])
        ready = np.maximum(clocks.stream[on] - done[begin], waits)
        ends[begin:end] = ready + done[begin + 1 : end + 1]
        clocks.stream[on] = float(ends[end - 1])
        clocks.host = float(base + launched[end])


def _meet(clocks: _Clocks, kind: int, stream: int, number: int) -> None:
    if kind == EventKind.EVENT_RECORD:
        clocks.event[number] = clocks.stream[stream]
    elif kind == EventKind.EVENT_WAIT:
        clocks.stream[stream] = max(clocks.stream[stream], clocks.event.get(number, 0.0))
    else:
        clocks.host = clocks.end if stream < 0 else max(clocks.host, clocks.stream[stream])
