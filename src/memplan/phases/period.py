"""The period of a training loop from nothing but the order of its requests.

Candidates are the distances between neighbouring occurrences of the same run of requests; a run
that occurs once a step votes for the step's length. A candidate is judged by the longest stretch of
requests that repeats at that distance, so a period inside a step (one layer like the next) loses to
the step itself where several steps are there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memplan.types.trace import I64

_VOTERS = (1, 4, 32)
"""Lengths of the runs that vote; powers of two."""
_CANDIDATES = 24


class Repetition(NamedTuple):
    """Items `[start, stop)` repeat with this period, at least twice."""

    start: int
    stop: int
    period: int


def find_repetitions(items: I64) -> list[Repetition]:
    """Stretches of `items` that repeat throughout with one period at least twice over, at most
    one for each period: the longest ones first, of equally long ones the shortest period."""
    found: list[Repetition] = []
    for period in _candidates(items):
        repeats = items[:-period] == items[period:]
        if np.count_nonzero(repeats) < period:
            continue
        start, length = _longest_run(repeats)
        if length >= period:
            found.append(Repetition(start, start + length + period, period))
    return sorted(found, key=lambda r: (r.start - r.stop, r.period))


def _candidates(items: I64) -> set[int]:
    """The distances with most votes for single items, for runs of 4 and for runs of 32."""
    found: set[int] = set()
    runs = np.unique(items, return_inverse=True)[1].astype(np.int64)
    length = 1
    while len(runs):
        if length in _VOTERS:
            found.update(_distances(runs))
        if length == max(_VOTERS) or len(runs) <= length:
            break
        pairs = runs[:-length] * (int(runs.max()) + 1) + runs[length:]
        runs = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
        length *= 2
    return {distance for distance in found if 2 * distance <= len(items)}


def _distances(runs: I64) -> list[int]:
    """Distances between neighbouring occurrences of equal runs, the most frequent ones."""
    order = np.argsort(runs, kind="stable")
    same = runs[order[1:]] == runs[order[:-1]]
    distances, counts = np.unique((order[1:] - order[:-1])[same], return_counts=True)
    return [int(d) for d in distances[np.argsort(-counts, kind="stable")[:_CANDIDATES]]]


def _longest_run(holds: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Start and length of the longest stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], holds.view(np.int8), [0]))))
    starts, stops = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    longest = int((stops - starts).argmax())
    return int(starts[longest]), int(stops[longest] - starts[longest])
