"""Steps of a training job, and the first one that the next one repeats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from memplan.phases.requests import request_signature
from memplan.phases.spans import PhaseSpans, phase_spans
from memplan.types.trace import I64, Phase, Trace


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

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, index: int) -> Step:
        return Step(int(self.start[index]), int(self.stop[index]))

    @cached_property
    def phases(self) -> PhaseSpans:
        """Forward, backward, optimizer and evaluation spans."""
        return phase_spans(self.trace, self.start, self.stop)


def find_steps(trace: Trace) -> StepTable:
    """Cut a trace into optimizer steps: it says where they end. None where it names none, as one
    imported from a table of allocator events."""
    events = trace.events
    step = np.maximum.accumulate(events.step)
    complete = int(step.max(initial=0))
    edges = np.searchsorted(step, np.arange(complete + 1)).astype(np.int64)
    working = events.phase != Phase.SETUP
    edges[0] = max(int(edges[0]), int(working.argmax()) if working.any() else 0)
    edges = np.maximum.accumulate(edges)
    start, stop = edges[:-1], edges[1:]
    return StepTable(trace, start, stop, _steady(trace, start, stop))


def _steady(trace: Trace, start: I64, stop: I64) -> int | None:
    ranges = zip(start.tolist(), stop.tolist(), strict=True)
    signatures = [request_signature(trace, *of_step) for of_step in ranges]
    return next((index for index, (a, b) in enumerate(pairwise(signatures)) if a == b), None)
