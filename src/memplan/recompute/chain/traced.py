"""The traced objective: checkpoints die as the backward passes them.

Tracing real steps shows that when the backward works on one segment, the checkpoints after it are
gone, and those before it are all that is left of the rest. With a_c the bytes of boundary c and
S(i, j) what segment (i, j] holds at its worst beside the checkpoints up to i (`_Tables` has its
terms), the peak of checkpoints 0 = c_0 < c_1 < … < c_m is

    max over r of  a_{c_0} + … + a_{c_r} + S(c_r, c_{r+1}),   c_{m+1} = n,

so the least peak of a suffix, beside the checkpoints before it, is

    g(i) = a_i + min( S(i, n), min over i < j < n of max(S(i, j), g(j)) ).

`least_peak` solves that in amortised O(n) where S grows with j and with falling i (`is_monotone`),
else by the recurrence as it stands, in O(n²). docs/recompute.md has the derivation.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np

from memplan._native import least_peak_chain
from memplan.recompute.chain.model import Chain
from memplan.types.solution import Solved
from memplan.types.step_graph import Bools
from memplan.types.trace import I64

MOST_QUADRATIC = 20_000
"""Layers up to which a chain that is not monotone is solved exactly (about a second per 10,000)."""

_NOTHING = -(2**62)


@dataclass(frozen=True)
class Subset:
    """Checkpoints on boundaries of a chain; the input, boundary 0, is always one and not named."""

    checkpoints: tuple[int, ...]
    peak_bytes: int


def least_peak(chain: Chain) -> Solved[Subset]:
    """The subset of boundaries with the least peak, its `cost`.

    `cost == bound` (proved least) for every chain that `is_monotone` and for all others of at most
    `MOST_QUADRATIC` layers. Raises ValueError as `Chain.check` does.
    """
    chain.check()
    tables = _Tables(chain)
    if tables.monotone():
        return _proved(*_linear(tables))
    if len(chain) <= MOST_QUADRATIC:
        return _proved(*_recurrence(tables))
    _, checkpoints = _linear(tables)
    bound, _ = _linear(tables.relaxed())
    peak = _peak(tables, checkpoints)
    return Solved(Subset(checkpoints, peak), cost=float(peak), bound=float(bound))


def recurrence(chain: Chain) -> Solved[Subset]:
    """As `least_peak`, by the recurrence as it stands: O(n²) time, whatever the chain."""
    chain.check()
    tables = _Tables(chain)
    return _proved(*_recurrence(tables))


def is_monotone(chain: Chain) -> bool:
    """Whether S is known to grow with j and with falling i, in O(n) time. With Q, D, F, u as in
    `_Tables`:

    - Q_i + u_i does not fall with i: a layer makes at least what it lets die;
    - what is held when the replay of a segment ending in j < n - 1 is dearest, when it ends, and at
      the first op of the backward that follows, does not fall with j, or stays under the backward's
      own peak D_j or D_{j+1} even with the dearest unsaved checkpoint before it.
    """
    return _Tables(chain).monotone()


def traced_peak(chain: Chain, checkpoints: tuple[int, ...]) -> int:
    """The objective's value for these boundaries (of 1..n-1, rising), in O(n)."""
    return _peak(_Tables(chain), checkpoints)


class _Tables:
    """The terms of S(i, j) = max(A - u_i, M, E), rows 0..n-1 for k = 1..n or i = 0..n-1:

    A(i, j) = max of D_k over i < k <= j, less Q_i: the segment's backward;
        D_k = Q_{k-1} + backward_k. An unsaved checkpoint has been let go by then, hence - u_i.
    M(i, j) = max(F_k over i < k < t, end_j) + entry_j - Q_i: the segment's replay, which ends in
        layer t = tail_j, the last one up to j that makes something saved; F_k = Q_{k-1} + u_{k-1} +
        replay_k, and u_{k-1} counts only inside the segment. Not less than first_j - Q_i, the
        backward's first op, which the checkpoint still sees.
    E(i, j) = max of y_{k-1} + forward_k over i < k <= j: the segment's first forward; y_i not
        counted, being a checkpoint.
    S(i, n) = max of Q_{k-1} + backward_saved_k and Q_{k-1} + u_{k-1} + forward_saving_k over k > i,
        less Q_i + u_i: the last segment is not dropped; y_i dies where it does in a plain run.
    """

    def __init__(self, chain: Chain) -> None:
        self.count = count = len(chain)
        self.input = int(chain.output[0])
        self.keep: I64 = chain.output[:count].astype(np.int64)
        self.kept: I64 = chain.kept[:count]
        self.unsaved: I64 = chain.unsaved[:count]
        self.backward: I64 = self.kept + chain.backward
        self.forward: I64 = chain.forward.astype(np.int64)
        before = self.kept + self.unsaved
        self.replay: I64 = before + chain.replay
        self.tail = _tails(chain)
        self.entry: I64 = chain.entry.astype(np.int64)
        self.end = self._ends(chain, before + chain.replay_saved)
        self.first: I64 = self.kept + chain.backward_first
        worst = np.maximum(self.kept + chain.backward_saved, before + chain.forward_saving)
        self.last: I64 = np.maximum.accumulate(worst[::-1])[::-1] - before

    def _ends(self, chain: Chain, replay_saved: I64) -> I64:
        """By j: F of the replay's last layer, which makes y only where it is saved and not the
        checkpoint j."""
        if not self.count:
            return self.replay
        at = np.maximum(self.tail, 1) - 1
        whole = chain.output_saved[at + 1] & (self.tail < np.arange(1, self.count + 1))
        return np.asarray(np.where(whole, self.replay[at], replay_saved[at]), np.int64)

    def monotone(self) -> bool:
        if self.count < 2:
            return True
        kept = self.kept + self.unsaved
        ends = np.where(self.tail > 0, self.end + self.entry, _NOTHING)
        return bool(
            (kept[:-1] <= kept[1:]).all()
            and (self._overshoots_rise(ends) & self._rises(ends) & self._rises(self.first)).all()
        )

    def _hidden(self, held: I64) -> Bools:
        """By j < n - 1: whether `held` by segments that end in j is no more than the backward's
        peak of layer j or j + 1, for every start."""
        most = held[:-2] + np.maximum.accumulate(self.unsaved)[:-2]
        peaks = np.maximum(self.backward[:-2], self.backward[1:-1])
        return np.asarray(most <= peaks, np.bool_)

    def _rises(self, held: I64) -> Bools:
        """By j < n - 1: whether S cannot fall from j to j + 1 because of `held`."""
        return np.asarray(self._hidden(held) | (held[:-2] <= held[1:-1]), np.bool_)

    def _overshoots_rise(self, ends: I64) -> Bools:
        """The same of the replay's layers before its last, but for those that the backward's peak
        of the same layer or the next hides whatever the segment's end."""
        later = np.maximum.accumulate(self.entry[:0:-1])[::-1]
        most = self.replay[:-1] + later + np.maximum.accumulate(self.unsaved)[:-1]
        hidden = most <= np.maximum(self.backward[:-1], self.backward[1:])
        seen = np.where(hidden, _NOTHING, self.replay[:-1])
        highest = np.concatenate(([_NOTHING], np.maximum.accumulate(seen)))
        over = highest[np.maximum(self.tail, 1) - 1]
        held = over + self.entry
        ends_or_entry = (held[:-2] <= ends[1:-1]) | (self.entry[:-2] <= self.entry[1:-1])
        rises = self._hidden(held) | ends_or_entry | (over <= self.end)[:-2]
        return np.asarray(rises, np.bool_)

    def relaxed(self) -> _Tables:
        """Tables of a monotone objective that is nowhere above this one."""
        result = copy(self)
        result.unsaved = np.maximum.accumulate(self.kept + self.unsaved) - self.kept
        result.tail = np.zeros_like(self.tail)
        result.first = np.full_like(self.first, _NOTHING)
        return result

    def segment(self, start: int) -> I64:
        """S(start, j) for j = start + 1..n - 1."""
        inside = slice(start, self.count - 1)
        free = int(self.unsaved[start])
        backward = np.maximum.accumulate(self.backward[inside]) - free
        replay = self.replay[inside].copy()
        entering = (self.keep + self.forward)[inside]
        if len(replay):
            replay[0] -= free
            entering[0] = self.forward[start]
        tails = self.tail[inside] - start
        ends = self.end[inside] - np.where(tails == 1, free, 0)
        highest = np.concatenate(([_NOTHING], np.maximum.accumulate(replay)))
        ends = np.maximum(ends, highest[np.maximum(tails, 1) - 1]) + self.entry[inside]
        worst = np.maximum(np.where(tails > 0, ends, _NOTHING), self.first[inside])
        worst = np.maximum(worst, backward) - self.kept[start]
        return np.asarray(np.maximum(worst, np.maximum.accumulate(entering)), np.int64)


def _tails(chain: Chain) -> I64:
    """By j = 1..n: the last layer up to j that a replay of a segment ending in j has to run, 0 for
    none: it fills z, or makes a saved y other than y_j."""
    layers = np.arange(1, len(chain) + 1)
    inner: Bools = (chain.saved > 0) | chain.output_saved[1:]
    reached = np.maximum.accumulate(np.where(inner, layers, 0))
    before = np.concatenate((np.zeros(1, np.int64), reached))[:-1]
    return np.where(chain.saved > 0, layers, before).astype(np.int64)


def _recurrence(tables: _Tables) -> tuple[int, tuple[int, ...]]:
    count = tables.count
    if not count:
        return tables.input, ()
    best = np.empty(count, np.int64)
    after = np.empty(count, np.int64)
    for start in range(count - 1, -1, -1):
        worst = np.maximum(tables.segment(start), best[start + 1 :])
        at = int(np.argmin(worst)) if len(worst) else -1
        whole = at < 0 or tables.last[start] <= worst[at]
        after[start] = count if whole else start + 1 + at
        best[start] = tables.keep[start] + (tables.last[start] if whole else worst[at])
    return int(best[0]), _follow(after, count)


def _linear(tables: _Tables) -> tuple[int, tuple[int, ...]]:
    if not tables.count:
        return tables.input, ()
    peak, checkpoints = least_peak_chain(
        tables.keep,
        tables.kept,
        tables.unsaved,
        tables.backward,
        tables.forward,
        tables.replay,
        tables.tail,
        tables.end,
        tables.entry,
        tables.first,
        tables.last,
    )
    return peak, tuple(checkpoints.tolist())


def _follow(after: I64, count: int) -> tuple[int, ...]:
    found = []
    at = int(after[0])
    while at < count:
        found.append(at)
        at = int(after[at])
    return tuple(found)


def _peak(tables: _Tables, checkpoints: tuple[int, ...]) -> int:
    """The objective; each segment's maxima over its own rows only, O(n) together."""
    count = tables.count
    if not count:
        return tables.input
    held = peak = 0
    for start, end in zip((0, *checkpoints), (*checkpoints, count), strict=True):
        held += int(tables.keep[start])
        peak = max(peak, held + _segment_bytes(tables, start, end))
    return peak


def _segment_bytes(tables: _Tables, start: int, end: int) -> int:
    """S(start, end) from its definition."""
    if end == tables.count:
        return int(tables.last[start])
    kept, free, row = int(tables.kept[start]), int(tables.unsaved[start]), end - 1
    terms = [int(tables.backward[start:end].max()) - free - kept, int(tables.first[row]) - kept]
    entering = (tables.keep[start + 1 : end] + tables.forward[start + 1 : end]).tolist()
    terms += [int(tables.forward[start]), *entering]
    tail = int(tables.tail[row])
    if tail > start:
        replays = tables.replay[start : tail - 1].tolist()
        if replays:
            replays[0] -= free
        replays.append(int(tables.end[row]) - (free if tail == start + 1 else 0))
        terms.append(max(replays) + int(tables.entry[row]) - kept)
    return max(terms)


def _proved(peak: int, checkpoints: tuple[int, ...]) -> Solved[Subset]:
    return Solved(Subset(checkpoints, peak), cost=float(peak), bound=float(peak))
