"""Steps of a training job, and the first one that the next one repeats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from memplan.phases.requests import first_difference, is_steady, request_signature
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
    reason: str
    """How many steps there are, and why one is steady or none is."""

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
    steady, reason = _find_steady(trace, start, stop)
    return StepTable(trace, start, stop, steady, f"{_count(complete)}; {reason}")


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
