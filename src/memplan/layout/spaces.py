"""Dynamic reusable space: where requests of unforeseen size can go without harm to the plan.

Dynamic requests are grouped by window: from the beginning of the module span in which they are
made to the end of the span in which they are released. The space of a window is the arena minus
every planned request in use during it (STAlloc, Huang et al., 2025). What STAlloc leaves to chance,
that there is enough of it, is planned for: each window has a block of its own in the layout, for
the most bytes that its requests had in use at once in the captured step, and one more of the
largest. Routing moves bytes from one expert to another and leaves their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.layout.dynamic import Bools
from memplan.layout.rounds import Blocks, Round
from memplan.types.allocation import rounded
from memplan.types.plan import Space
from memplan.types.trace import I64, Phase

_LEAST = 4096
"""Smaller gaps are of no use."""


@dataclass(frozen=True)
class Windows:
    """Where dynamic requests live, one row a window `[lower, upper)`."""

    lower: I64
    upper: I64
    of_row: I64
    """By row of the round: its window; -1 for what is not dynamic, or outlives a round."""
    blocks: Blocks


def dynamic_windows(made: Round) -> Windows:
    """The windows of a round and of its setup, with the block that each needs."""
    of_row = np.full(len(made), -1, np.int64)
    rows = np.flatnonzero(made.dynamic & ~made.kept & (made.upper - made.alloc < made.clock))
    none = np.zeros(0, np.int64)
    if not len(rows):
        return Windows(none, none, of_row, Blocks(none, none, none))
    first, last = _windows(made, rows)
    windows, number = np.unique(np.stack((first, last), axis=1), axis=0, return_inverse=True)
    number = number.reshape(-1)
    of_row[rows] = number
    size = rounded(made.bytes[rows])
    need = np.array(
        [
            _room(made.alloc[mine], made.upper[mine], size[number == window])
            for window in range(len(windows))
            for mine in (rows[number == window],)
        ],
        np.int64,
    )
    lower, upper = windows[:, 0].copy(), windows[:, 1].copy()
    return Windows(lower, upper, of_row, Blocks(lower, upper, need))


def _room(alloc: I64, end: I64, size: I64) -> int:
    """The most bytes in use at once, and one more of the largest."""
    order = np.argsort(np.concatenate((end, alloc)), kind="stable")
    in_use = np.cumsum(np.concatenate((-size, size))[order])
    return int(in_use.max()) + int(size.max())


def reusable_spaces(
    made: Round, windows: Windows, offsets: I64, blocks: I64, arena: int
) -> list[Space]:
    """The space of each window, given the offsets of requests and blocks."""
    events, strings = made.step.trace.events, made.step.trace.strings
    planned = np.flatnonzero(offsets >= 0)
    starts = np.concatenate((offsets[planned], blocks))
    sizes = np.concatenate((rounded(made.bytes[planned]), windows.blocks.size))
    lower = np.concatenate((made.lower[planned], windows.lower))
    upper = np.concatenate((made.upper[planned], windows.upper))
    cyclic = np.concatenate((planned >= made.setup, windows.lower >= made.start))
    found = []
    for number, (first, last) in enumerate(zip(windows.lower, windows.upper, strict=True)):
        used = _in_use(made, lower, upper, cyclic, int(first), int(last))
        used[len(planned) + number] = False
        ranges = _gaps(starts[used], (starts + sizes)[used], arena)
        row = int((windows.of_row == number).argmax())
        module = strings[int(events.module[min(int(made.alloc[row]), len(events) - 1)])]
        found.append(Space(module, int(first), int(last), ranges))
    return found


def _windows(made: Round, rows: I64) -> tuple[I64, I64]:
    """From the beginning of the span of each allocation to the end of the span of its release."""
    edges = _span_edges(made, rows)
    alloc, end = made.alloc[rows], made.upper[rows]
    first = edges[np.searchsorted(edges, alloc, side="right") - 1]
    first = np.where(rows < made.setup, first, np.maximum(first, made.start))
    # The trace may stop before a round does; what it repeats is one round earlier.
    known = np.where(end <= edges[-1], end, end - made.clock)
    last = edges[np.searchsorted(edges, known, side="left")] + (end - known)
    most = np.where(rows < made.setup, made.end, first + made.clock)
    return first, np.maximum(np.minimum(last, most), end)


def _span_edges(made: Round, rows: I64) -> I64:
    """Where the operators of one module end and those of another begin. A module that makes dynamic
    requests includes those that it calls."""
    trace = made.step.trace
    events, strings = trace.events, trace.strings
    asked = made.alloc[rows]
    makers = {strings[n] for n in np.unique(events.module[asked[asked < len(trace)]]).tolist()}
    owner = np.arange(len(strings))
    numbers = {strings[n]: n for n in np.unique(events.module).tolist()}
    for name, number in numbers.items():
        words = name.split(".")
        above = (".".join(words[:count]) for count in range(1, len(words) + 1))
        shortest = next((path for path in above if path in makers and path in numbers), name)
        owner[number] = numbers[shortest]
    module, backward = owner[events.module], events.phase == Phase.BACKWARD
    changes = (module[1:] != module[:-1]) | (backward[1:] != backward[:-1])
    return np.concatenate(([0], np.flatnonzero(changes) + 1, [len(trace)]))


def _in_use(made: Round, lower: I64, upper: I64, cyclic: Bools, first: int, last: int) -> Bools:
    """Which lifetimes meet `[first, last)`, in the first round or a later one."""
    used: Bools = (lower < last) & (first < upper)
    if first < made.start:
        return used
    for shift in (-made.clock, made.clock):
        used |= cyclic & (lower + shift < last) & (first < upper + shift)
    used |= (upper == made.end) & ~cyclic
    return used


def _gaps(starts: I64, ends: I64, arena: int) -> list[tuple[int, int]]:
    """What of `[0, arena)` none of the ranges covers."""
    order = np.argsort(starts, kind="stable")
    covered = np.concatenate(([0], np.maximum.accumulate(ends[order])))
    until = np.append(starts[order], arena)
    wide = np.flatnonzero(until - covered >= _LEAST)
    return list(zip(covered[wide].tolist(), until[wide].tolist(), strict=True))
