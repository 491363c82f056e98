"""A chain of layers: what forward and backward of each hold, and the checkpoints of least peak.

Layer k of n makes the boundary value y_k from y_{k-1} and its parameters w_k; y_0 is the input:

    forward    y_k, z_k        = F_k(y_{k-1}, w_k)
    backward   dy_{k-1}, dw_k  = B_k(dy_k, z_k, w_k, and those of y_{k-1} and y_k that it reads)

z_k is what the layer saves for its backward beside boundary values: masks, statistics, everything
inside a layer of several ops. A boundary value that no backward reads is *unsaved*: it dies as soon
as the next layer has run, unless a checkpoint on it holds it. docs/recompute.md derives the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.types.step_graph import Bools
from memplan.types.trace import I64

_NOTHING = -(2**62)


@dataclass(frozen=True)
class Chain:
    """Bytes, by layer k = 1..n (row k - 1) or by boundary k = 0..n (row k).

    The columns of layers are most bytes held while something runs, *beside* what the comment
    names. They may be negative where a layer's saved data dies before it reaches its peak.
    """

    output: I64
    """By boundary: y_k."""
    output_saved: Bools
    """By boundary: some backward reads y_k, so that it lives until then in a plain run."""
    saved: I64
    """z_k."""
    forward: I64
    """Forward of layer k when nothing of it is kept, beside y_{k-1} and checkpoints."""
    forward_saving: I64
    """Forward of layer k when it keeps what it saves, beside y_{k-1} and what earlier layers
    save."""
    replay: I64
    """Replay of layer k up to y_k and z_k, beside y_{k-1} and what earlier replays saved."""
    replay_saved: I64
    """Replay of what only z_k needs, when y_k is there or nobody wants it. Not looked at where z_k
    is empty."""
    entry: I64
    """Before the first op of layer k's backward, beside all z and earlier y: dy_k, what the later
    layers left behind (gradients of parameters), and y_k where the layer's own backward reads
    it."""
    backward_first: I64
    """First op of layer k's backward, beside what earlier layers save."""
    backward: I64
    """All ops of layer k's backward after a replay, beside what earlier layers save."""
    backward_saved: I64
    """The same in a plain run, in which what forward saved may be let go of a little later."""

    def __len__(self) -> int:
        return len(self.saved)


@dataclass(frozen=True)
class Subset:
    """Checkpoints on boundaries of a chain; the input, boundary 0, is always one and not named."""

    checkpoints: tuple[int, ...]
    peak_bytes: int


def least_peak(chain: Chain) -> Subset:
    """The subset of boundaries with the least peak, by a recurrence over suffixes: the checkpoints
    before one add the same to all that follows it. O(n²) time."""
    count = len(chain)
    if not count:
        return Subset((), int(chain.output[0]))
    segments = _Segments(chain)
    best, after = np.empty(count, np.int64), np.empty(count, np.int64)
    for start in range(count - 1, -1, -1):
        worst = np.maximum(segments.dropped(start), best[start + 1 :])
        at = int(np.argmin(worst)) if len(worst) else -1
        whole = at < 0 or segments.last[start] <= worst[at]
        after[start] = count if whole else start + 1 + at
        best[start] = chain.output[start] + (segments.last[start] if whole else worst[at])
    checkpoints = []
    at = int(after[0])
    while at < count:
        checkpoints.append(at)
        at = int(after[at])
    return Subset(tuple(checkpoints), int(best[0]))


class _Segments:
    """What segment (i, j] holds at its worst beside the checkpoints up to i. Rows are k - 1 for
    layers, i for boundaries. With Q what a plain forward keeps of the first layers, and u the
    boundaries that are unsaved:

    - its backward: max of Q_{k-1} + backward_k over i < k <= j, less Q_i + u_i, as an unsaved
      checkpoint has been let go of by then;
    - its replay: max(Q_{k-1} + u_{k-1} + replay_k over i < k < t, end_j) + entry_j - Q_i, which
      ends in layer t = tail_j, the last one up to j that makes something saved; u_{k-1} counts only
      inside the segment. Not less than the backward's first op, which the checkpoint still sees;
    - its first forward: max of y_{k-1} + forward_k over i < k <= j, y_i not counted.
    """

    def __init__(self, chain: Chain) -> None:
        self.count = count = len(chain)
        self.chain = chain
        steps = chain.saved + np.where(chain.output_saved, chain.output, 0)[1:]
        self.kept: I64 = np.concatenate((np.zeros(1, np.int64), np.cumsum(steps)))[:count]
        self.unsaved: I64 = np.where(chain.output_saved, 0, chain.output)[:count]
        self.unsaved[0] = 0
        before = self.kept + self.unsaved
        self.replay: I64 = before + chain.replay
        self.tail = _tails(chain)
        # The replay's last layer makes y only where it is saved and not the checkpoint j.
        at = np.maximum(self.tail, 1) - 1
        whole = chain.output_saved[at + 1] & (self.tail < np.arange(1, count + 1))
        self.end = np.where(whole, self.replay[at], (before + chain.replay_saved)[at])
        worst = np.maximum(self.kept + chain.backward_saved, before + chain.forward_saving)
        self.last: I64 = np.maximum.accumulate(worst[::-1])[::-1] - before
        """By i: of the segment (i, n], which is never dropped."""

    def dropped(self, start: int) -> I64:
        """Of the segments (start, j] for j = start + 1..n - 1."""
        chain, inside = self.chain, slice(start, self.count - 1)
        free = int(self.unsaved[start])
        backward = np.maximum.accumulate((self.kept + chain.backward)[inside]) - free
        replay = self.replay[inside].copy()
        entering = chain.output[inside] + chain.forward[inside]
        if len(replay):
            replay[0] -= free
            entering[0] = chain.forward[start]
        tails = self.tail[inside] - start
        ends = self.end[inside] - np.where(tails == 1, free, 0)
        highest = np.concatenate(([_NOTHING], np.maximum.accumulate(replay)))
        ends = np.maximum(ends, highest[np.maximum(tails, 1) - 1]) + chain.entry[inside]
        first = (self.kept + chain.backward_first)[inside]
        worst = np.maximum(np.where(tails > 0, ends, _NOTHING), first)
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
