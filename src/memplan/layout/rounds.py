"""What a job asks up to its steady step and in it: a setup and a round, as one `Problem`.

The round repeats, so a request has one address in every round, and what lives across its boundary
is in use at both ends of it. A request that outlives a whole step meets its own successor; a round
is then two steps, which gives it two addresses in turn. The round is cut where the least bytes are
in use; what is alive there has a row at both ends of it, twins with one address. The setup is
all that comes before, the building of the model included; what of it outlives a round is taken to
stay.

Moments are indices of the trace's events: the setup takes `[0, start)`, the first round
`[start, start + clock)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.layout.dynamic import Bools
from memplan.layout.problem import Layout, Problem, make_problem
from memplan.layout.step import StepRequests
from memplan.types.allocation import ROUNDING, rounded
from memplan.types.trace import I64, EventKind

_WORTH_TWO_STEPS = 1e-3
"""Share of the step's bytes that outlives a step, from which on a round is two steps."""
_UNBOUNDED = 1 << 50


@dataclass(frozen=True)
class Round:
    """Requests in the order of their allocation: those of the setup, then those of a round."""

    step: StepRequests
    steps: int
    """Optimizer steps of the round."""
    start: int
    clock: int
    setup: int
    """Rows of the setup."""
    bytes: I64
    stream: I64
    phase: I64
    """Number in `step.phases`; -1 in the setup."""
    alloc: I64
    """The request's own moment."""
    lower: I64
    """Earlier than `alloc` by the waits between streams."""
    upper: I64
    """Of the setup at most `start + clock`, which stands for ever; of the round at most
    `lower + clock`."""
    dynamic: Bools
    kept: Bools
    """Of the round, and never released."""
    planned: I64
    """Rows that get an address."""

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def end(self) -> int:
        """Of the first round."""
        return self.start + self.clock


def make_round(step: StepRequests, *, setup: bool = True) -> Round:
    """The setup and the round of a steady step; without `setup` the round alone, for a job
    whose memory of before is elsewhere."""
    length = step.upper - step.lower
    static = ~step.dynamic & ~step.kept
    outlives = static & (length > step.clock) & (step.upper - step.alloc <= 2 * step.clock)
    steps = 1
    if step.bytes[outlives].sum() > _WORTH_TWO_STEPS * _peak(step, static & ~outlives):
        steps = 2
    clock = steps * step.clock
    # Unknown waits between streams make a lifetime longer than the round: then it is the round.
    held = step.upper - step.alloc
    can = static & ((held <= clock) | (step.upper >= _UNBOUNDED))
    length = np.minimum(length, clock)
    rows = np.tile(np.arange(len(step)), steps)
    shift = np.repeat(np.arange(steps) * step.clock, len(step))
    alloc, lower, length = step.alloc[rows] + shift, step.lower[rows] + shift, length[rows]
    can = can[rows]
    cut = _quietest(lower[can] % clock, length[can], rounded(step.bytes)[rows][can], clock)
    alloc = (alloc - cut) % clock
    lower = np.where(length == clock, 0, (lower - cut) % clock)
    order = np.argsort(alloc, kind="stable")
    rows = rows[order]
    start = step.start + cut
    before = _setup(step, start if setup else 0, start + clock)
    count = len(before.event)
    return Round(
        step=step,
        steps=steps,
        start=start,
        clock=clock,
        setup=count,
        bytes=np.concatenate((step.trace.events.bytes[before.event], step.bytes[rows])),
        stream=np.concatenate((step.trace.events.stream[before.event], step.stream[rows])),
        phase=np.concatenate((np.full(count, -1), step.phase_start[rows])),
        alloc=np.concatenate((before.event, start + alloc[order])),
        lower=np.concatenate((before.lower, start + lower[order])),
        upper=np.concatenate((before.upper, start + (lower + length)[order])),
        dynamic=np.concatenate((before.dynamic, step.dynamic[rows])),
        kept=np.concatenate((np.zeros(count, np.bool_), step.kept[rows])),
        planned=np.flatnonzero(np.concatenate((~before.dynamic, can[order]))),
    )


@dataclass(frozen=True)
class _Setup:
    event: I64
    lower: I64
    upper: I64
    dynamic: Bools


def _setup(step: StepRequests, stop: int, end: int) -> _Setup:
    """The requests of events `[0, stop)`, in use until `end` at most."""
    events = step.trace.events
    asked = (events.kind[:stop] == EventKind.ALLOC) & (events.bytes[:stop] > 0)
    event = np.flatnonzero(asked & (events.device[:stop] == step.device))
    storage = events.storage[event]
    lower = np.maximum(step.lifetimes.begin[storage], 0)
    upper = np.minimum(step.lifetimes.end[storage], end)
    return _Setup(event, lower, upper, step.data_dependent[storage])


def _peak(step: StepRequests, rows: Bools) -> int:
    """Most bytes of these rows in use within the step."""
    change = np.zeros(step.clock + 1, np.int64)
    np.add.at(change, np.clip(step.lower[rows], 0, step.clock), step.bytes[rows])
    np.add.at(change, np.clip(step.upper[rows], 0, step.clock), -step.bytes[rows])
    return int(np.cumsum(change).max(initial=0))


def _quietest(lower: I64, length: I64, size: I64, clock: int) -> int:
    """The moment of the round before which the least bytes are in use."""
    change = np.zeros(clock + 1, np.int64)
    upper = lower + length
    np.add.at(change, lower, size)
    np.add.at(change, np.minimum(upper, clock), -size)
    around = upper > clock
    change[0] += size[around].sum()
    np.add.at(change, upper[around] - clock, -size[around])
    in_use = np.cumsum(change)[:clock]
    return int(in_use.argmin())


@dataclass(frozen=True)
class Blocks:
    """Room for dynamic requests, one row a window: so many bytes over `[lower, upper)`."""

    lower: I64
    upper: I64
    size: I64

    def __len__(self) -> int:
        return len(self.size)


def round_problem(made: Round, blocks: Blocks) -> tuple[Problem, I64]:
    """The problem of the planned rows and of the blocks; for each row of it the row of the round,
    those of the blocks following after.

    A request that lives across the cut has a second row, for its end in the next round, and the
    two are twins. In the first round that end is the end of a request of the setup: where one of
    that size ends there, it is the second row.
    """
    planned = np.concatenate((made.planned, len(made) + np.arange(len(blocks))))
    size = np.concatenate((rounded(made.bytes[made.planned]), blocks.size))
    lower = np.concatenate((made.lower[made.planned], blocks.lower))
    upper = np.concatenate((made.upper[made.planned], blocks.upper))
    around = np.flatnonzero(upper > made.end)
    tails = upper[around] - made.clock
    lasts = np.flatnonzero((planned < made.setup) & (upper > made.start) & (upper < made.end))
    by_end: dict[tuple[int, int], list[int]] = {}
    for row in lasts.tolist():
        by_end.setdefault((int(size[row]), int(upper[row])), []).append(row)
    twin = np.full(len(planned), -1, np.int64)
    alone = []
    for at, row in enumerate(around.tolist()):
        former = by_end.get((int(size[row]), int(tails[at])))
        if former:
            twin[row] = former.pop()
            twin[twin[row]] = row
        else:
            alone.append(at)
    rest = around[alone]
    twin[rest] = len(planned) + np.arange(len(rest))
    upper = np.minimum(upper, made.end)
    names = [str(row) for row in planned.tolist()]
    problem = make_problem(
        np.concatenate((lower, np.full(len(rest), made.start))),
        np.concatenate((upper, tails[alone])),
        np.concatenate((size, size[rest])),
        alignment=np.full(len(planned) + len(rest), ROUNDING, np.int64),
        twin=np.concatenate((twin, rest)),
        ids=(*names, *(f"{names[row]}'" for row in rest.tolist())),
    )
    return problem, np.concatenate((planned, planned[rest]))


def offsets_of(made: Round, blocks: Blocks, rows: I64, layout: Layout) -> tuple[I64, I64]:
    """By row of the round its offset, -1 where it is not planned; and those of the blocks."""
    offsets = np.full(len(made) + len(blocks), -1, np.int64)
    offsets[rows] = layout.offsets
    return offsets[: len(made)], offsets[len(made) :]
