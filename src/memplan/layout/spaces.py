"""Reusable space for dynamic requests, whose size depends on data, beside planned ones.

Dynamic requests are grouped by window: from the beginning of the module span in which they are made
to the end of the span in which they are released. The space of a window is the arena without the
planned requests in use during it (STAlloc, Huang et al., 2025). STAlloc does not ensure that this
space is large enough. Here each window also has a block of its own in the layout: as large as the
most bytes that its requests had in use at once in the captured step, plus one more request of the
largest size. Routing moves bytes from one expert to another, but keeps their sum.
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
"""Gaps of fewer bytes are not used."""


@dataclass(frozen=True)
class Windows:
    """The windows `[lower, upper)` of dynamic requests, one row each."""

    lower: I64
    upper: I64
    of_row: I64
    """The window of each row of the round; -1 for a row that is not dynamic or outlives a round."""
    blocks: Blocks


def dynamic_windows(round_: Round) -> Windows:
    """The windows of a round and of its setup, with the block that each needs."""
    of_row = np.full(len(round_), -1, np.int64)
    rows = np.flatnonzero(
        round_.dynamic & ~round_.kept & (round_.upper - round_.alloc < round_.clock)
    )
    none = np.zeros(0, np.int64)
    if not len(rows):
        return Windows(none, none, of_row, Blocks(none, none, none))
    first, last = _windows(round_, rows)
    windows, number = np.unique(np.stack((first, last), axis=1), axis=0, return_inverse=True)
    number = number.reshape(-1)
    of_row[rows] = number
    size = rounded(round_.bytes[rows])
    need = np.array(
        [
            _room(round_.alloc[mine], round_.upper[mine], size[number == window])
            for window in range(len(windows))
            for mine in (rows[number == window],)
        ],
        np.int64,
    )
    lower, upper = windows[:, 0].copy(), windows[:, 1].copy()
    return Windows(lower, upper, of_row, Blocks(lower, upper, need))


def _room(alloc: I64, end: I64, size: I64) -> int:
    """The most bytes in use at once, plus one more request of the largest size."""
    order = np.argsort(np.concatenate((end, alloc)), kind="stable")
    in_use = np.cumsum(np.concatenate((-size, size))[order])
    return int(in_use.max()) + int(size.max())


def reusable_spaces(
    round_: Round, windows: Windows, offsets: I64, blocks: I64, arena: int
) -> list[Space]:
    """The space of each window, given the offsets of requests and blocks."""
    events, strings = round_.step.trace.events, round_.step.trace.strings
    planned = np.flatnonzero(offsets >= 0)
    starts = np.concatenate((offsets[planned], blocks))
    sizes = np.concatenate((rounded(round_.bytes[planned]), windows.blocks.size))
    lower = np.concatenate((round_.lower[planned], windows.lower))
    upper = np.concatenate((round_.upper[planned], windows.upper))
    cyclic = np.concatenate((planned >= round_.setup, windows.lower >= round_.start))
    found = []
    for number, (first, last) in enumerate(zip(windows.lower, windows.upper, strict=True)):
        used = _in_use(round_, lower, upper, cyclic, int(first), int(last))
        used[len(planned) + number] = False
        ranges = _gaps(starts[used], (starts + sizes)[used], arena)
        row = int((windows.of_row == number).argmax())
        module = strings[int(events.module[min(int(round_.alloc[row]), len(events) - 1)])]
        found.append(Space(module, int(first), int(last), ranges))
    return found


def _windows(round_: Round, rows: I64) -> tuple[I64, I64]:
    """The window of each request: from the beginning of the module span of its allocation to the
    end of the span of its release."""
    edges = _span_edges(round_, rows)
    alloc, end = round_.alloc[rows], round_.upper[rows]
    first = edges[np.searchsorted(edges, alloc, side="right") - 1]
    first = np.where(rows < round_.setup, first, np.maximum(first, round_.start))
    # The trace may end before a round does; then the events of the round before are used.
    known = np.where(end <= edges[-1], end, end - round_.clock)
    last = edges[np.searchsorted(edges, known, side="left")] + (end - known)
    most = np.where(rows < round_.setup, round_.end, first + round_.clock)
    return first, np.maximum(np.minimum(last, most), end)


def _span_edges(round_: Round, rows: I64) -> I64:
    """Moments at which the operators of one module end and those of another begin. A module with
    dynamic requests includes the modules that it calls."""
    trace = round_.step.trace
    events, strings = trace.events, trace.strings
    asked = round_.alloc[rows]
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


def _in_use(round_: Round, lower: I64, upper: I64, cyclic: Bools, first: int, last: int) -> Bools:
    """Which lifetimes overlap `[first, last)`, in the first round or a later one."""
    used: Bools = (lower < last) & (first < upper)
    if first < round_.start:
        return used
    for shift in (-round_.clock, round_.clock):
        used |= cyclic & (lower + shift < last) & (first < upper + shift)
    used |= (upper == round_.end) & ~cyclic
    return used


def _gaps(starts: I64, ends: I64, arena: int) -> list[tuple[int, int]]:
    """The parts of `[0, arena)` that no range covers."""
    order = np.argsort(starts, kind="stable")
    covered = np.concatenate(([0], np.maximum.accumulate(ends[order])))
    until = np.append(starts[order], arena)
    wide = np.flatnonzero(until - covered >= _LEAST)
    return list(zip(covered[wide].tolist(), until[wide].tolist(), strict=True))
