"""Phases as half-open ranges of events, one row each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan.types.trace import I32, I64, U8, Phase, Trace


@dataclass(frozen=True)
class PhaseSpans:
    """Row i: `phase[i]` lasts over events `[start[i], stop[i])` of step `step[i]` (a row of the
    step table)."""

    step: I32
    phase: U8
    micro_batch: I32
    """Number of the forward pass in its step that the span belongs to, from 0."""
    start: I64
    stop: I64

    def __len__(self) -> int:
        return len(self.step)


def phase_spans(trace: Trace, starts: I64, stops: I64) -> PhaseSpans:
    """Maximal runs of one phase within each step `[starts[i], stops[i])`."""
    step = _step_of_events(len(trace), starts, stops)
    phase = trace.events.phase
    begin, end = _runs(step, phase)
    keep = step[begin] >= 0
    begin, end = begin[keep], end[keep]
    return PhaseSpans(
        step=step[begin],
        phase=phase[begin],
        micro_batch=_micro_batches(step[begin], phase[begin]),
        start=begin,
        stop=end,
    )


def _micro_batches(step: I32, phase: U8) -> I32:
    """Counts, in each step, how often a forward pass follows a backward pass."""
    number = np.zeros(len(step), np.int32)
    current, batch, gone_backward = -1, 0, False
    for row, (of_step, of_phase) in enumerate(zip(step.tolist(), phase.tolist(), strict=True)):
        if of_step != current:
            current, batch, gone_backward = of_step, 0, False
        if of_phase == Phase.BACKWARD:
            gone_backward = True
        elif of_phase == Phase.FORWARD and gone_backward:
            batch, gone_backward = batch + 1, False
        number[row] = batch
    return number


def _step_of_events(count: int, starts: I64, stops: I64) -> I32:
    """For each event the row of the step that it belongs to, or -1."""
    step = np.full(count, -1, np.int32)
    for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        step[start:stop] = row
    return step


def _runs(*columns: npt.NDArray[np.integer]) -> tuple[I64, I64]:
    """Half-open ranges over which all columns stay the same."""
    count = len(columns[0])
    if not count:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    changes = np.zeros(count - 1, bool)
    for column in columns:
        changes |= column[1:] != column[:-1]
    begin = np.concatenate(([0], np.flatnonzero(changes) + 1)).astype(np.int64)
    return begin, np.append(begin[1:], count)
