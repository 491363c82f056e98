"""The requests of a job up to its steady step and in it, as one `Problem`: a setup and a round.

A round is one steady step, which repeats. A request has the same address in every round. One that
lives across the boundary of rounds is in use at the end of one and at the beginning of the next: it
has a row at both ends, and the two are twins with one address. The boundary is put where the least
bytes are in use. A request that outlives a whole step is still alive when its successor is made;
then a round is two steps, with two addresses that are used in turn. The setup is everything before
the first round, also the building of the model. A request of the setup that outlives a round is
assumed to stay for ever.

Moments are indices of the trace's events: the setup is `[0, start)`, the first round
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
"""If at least this share of the step's bytes outlives a step, a round is two steps."""
_UNBOUNDED = 1 << 50


@dataclass(frozen=True)
class Round:
    """The requests of the setup, then those of a round, each in the order of allocation."""

    step: StepRequests
    steps: int
    """Number of optimizer steps in a round."""
    start: int
    """First moment of the first round."""
    clock: int
    """Number of moments in a round."""
    setup: int
    """Number of rows of the setup."""
    bytes: I64
    stream: I64
    phase: I64
    """Index in `step.phases`; -1 in the setup."""
    alloc: I64
    """Moment of the request itself."""
    lower: I64
    """Beginning of its lifetime: earlier than `alloc` where its stream waits for another."""
    upper: I64
    """End of its lifetime. For the setup at most `start + clock`, which means for ever; for the
    round at most `lower + clock`."""
    dynamic: Bools
    """Whether its size depends on data."""
    kept: Bools
    """Whether it belongs to the round and is never released."""
    planned: I64
    """The rows that get an address."""

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def end(self) -> int:
        """End of the first round."""
        return self.start + self.clock


def make_round(step: StepRequests, *, setup: bool = True) -> Round:
    """The setup and the round of a steady step. Without `setup` only the round, for a job that has
    got its memory of the setup already."""
    length = step.upper - step.lower
    static = ~step.dynamic & ~step.kept
    outlives = static & (length > step.clock) & (step.upper - step.alloc <= 2 * step.clock)
    steps = 1
    if step.bytes[outlives].sum() > _WORTH_TWO_STEPS * _peak(step, static & ~outlives):
        steps = 2
    clock = steps * step.clock
    # Where the waits between streams are unknown, a lifetime is longer than the round: it is cut.
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
    """The requests of events `[0, stop)`, with lifetimes that end at `end` at the latest."""
    events = step.trace.events
    asked = (events.kind[:stop] == EventKind.ALLOC) & (events.bytes[:stop] > 0)
    event = np.flatnonzero(asked & (events.device[:stop] == step.device))
    storage = events.storage[event]
    lower = np.maximum(step.lifetimes.begin[storage], 0)
    upper = np.minimum(step.lifetimes.end[storage], end)
    return _Setup(event, lower, upper, step.data_dependent[storage])


def _peak(step: StepRequests, rows: Bools) -> int:
    """The most bytes of these rows that are in use at once within the step."""
    change = np.zeros(step.clock + 1, np.int64)
    np.add.at(change, np.clip(step.lower[rows], 0, step.clock), step.bytes[rows])
    np.add.at(change, np.clip(step.upper[rows], 0, step.clock), -step.bytes[rows])
    return int(np.cumsum(change).max(initial=0))


def _quietest(lower: I64, length: I64, size: I64, clock: int) -> int:
    """The moment of the round at which the least bytes are in use across the boundary before it."""
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
    """Room for dynamic requests: bytes over `[lower, upper)`, one row for each window."""

    lower: I64
    upper: I64
    size: I64

    def __len__(self) -> int:
        return len(self.size)


def round_problem(round_: Round, blocks: Blocks) -> tuple[Problem, I64]:
    """The problem of the planned rows and of the blocks. Also returns, for each of its rows, the
    row of the round; numbers from `len(round_)` on are blocks.

    A request that lives across the boundary has a second row for its end in the next round, and the
    two are twins. In the first round that end belongs to a request of the setup: if one of the same
    size ends there, it is the twin.
    """
    planned = np.concatenate((round_.planned, len(round_) + np.arange(len(blocks))))
    size = np.concatenate((rounded(round_.bytes[round_.planned]), blocks.size))
    lower = np.concatenate((round_.lower[round_.planned], blocks.lower))
    upper = np.concatenate((round_.upper[round_.planned], blocks.upper))
    around = np.flatnonzero(upper > round_.end)
    tails = upper[around] - round_.clock
    lasts = np.flatnonzero((planned < round_.setup) & (upper > round_.start) & (upper < round_.end))
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
    upper = np.minimum(upper, round_.end)
    names = [str(row) for row in planned.tolist()]
    problem = make_problem(
        np.concatenate((lower, np.full(len(rest), round_.start))),
        np.concatenate((upper, tails[alone])),
        np.concatenate((size, size[rest])),
        alignment=np.full(len(planned) + len(rest), ROUNDING, np.int64),
        twin=np.concatenate((twin, rest)),
        ids=(*names, *(f"{names[row]}'" for row in rest.tolist())),
    )
    return problem, np.concatenate((planned, planned[rest]))


def offsets_of(round_: Round, blocks: Blocks, rows: I64, layout: Layout) -> tuple[I64, I64]:
    """The offset of each row of the round, -1 where not planned; and those of the blocks."""
    offsets = np.full(len(round_) + len(blocks), -1, np.int64)
    offsets[rows] = layout.offsets
    return offsets[: len(round_)], offsets[len(round_) :]
