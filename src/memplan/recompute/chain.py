"""Optimal checkpoints of a chain of layers, given what forward and backward of each layer hold.

Layer k of n computes the boundary value y_k from y_{k-1} and its parameters w_k; y_0 is the input:

    forward    y_k, z_k        = F_k(y_{k-1}, w_k)
    backward   dy_{k-1}, dw_k  = B_k(dy_k, z_k, w_k, and those of y_{k-1} and y_k that it reads)

z_k is what the layer saves for its backward beside boundary values: masks, statistics, and values
inside a layer of several ops. A boundary value that no backward reads is *unsaved*: it is freed as
soon as the next layer has run, unless it is a checkpoint. docs/recompute.md derives the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.types.step_graph import Bools
from memplan.types.trace import I64

_NOTHING = -(2**62)


@dataclass(frozen=True)
class Chain:
    """A chain as columns of bytes, for layers k = 1..n (row k - 1) or boundaries k = 0..n (row k).

    Columns of layers are the most bytes held while something runs, *without* the values that are
    named after "beside". They may be negative where a layer frees saved values before its peak.
    """

    output: I64
    """y_k, for each boundary."""
    output_saved: Bools
    """Whether some backward reads y_k, so that it lives until then without recomputation."""
    saved: I64
    """z_k."""
    forward: I64
    """Forward of layer k where nothing of it is kept, beside y_{k-1} and checkpoints."""
    forward_saving: I64
    """Forward of layer k where its saves are kept, beside y_{k-1} and earlier layers' saves."""
    replay: I64
    """Replay of layer k up to y_k and z_k, beside y_{k-1} and what earlier replays saved."""
    replay_saved: I64
    """Replay of layer k for z_k only, with y_k in memory or not needed. Unused without z_k."""
    entry: I64
    """Held before the first op of layer k's backward, beside all z and earlier y: dy_k, gradients
    of parameters of later layers, and y_k where the layer's own backward reads it."""
    backward_first: I64
    """First op of layer k's backward, beside what earlier layers save."""
    backward: I64
    """All ops of layer k's backward after a replay, beside what earlier layers save."""
    backward_saved: I64
    """The same without a replay, where saved values may be freed a little later."""

    def __len__(self) -> int:
        return len(self.saved)


@dataclass(frozen=True)
class Subset:
    """Boundaries that are checkpoints. The input, boundary 0, always is one and is left out."""

    checkpoints: tuple[int, ...]
    peak_bytes: int


def least_peak(chain: Chain) -> Subset:
    """The checkpoints with the lowest peak, in O(n²) time, by a recurrence over suffixes of the
    chain: the checkpoints before a boundary add the same bytes to everything behind it."""
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
    """The peak of a segment (i, j], beside the checkpoints up to i. Rows are k - 1 for layers and i
    for boundaries. Let Q be what forward keeps of the first layers without recomputation, and u the
    bytes of unsaved boundaries. The peak is the largest of

    - its backward: max of Q_{k-1} + backward_k over i < k <= j, less Q_i + u_i, because an unsaved
      checkpoint has been freed by then;
    - its replay: max(Q_{k-1} + u_{k-1} + replay_k over i < k < t, end_j) + entry_j - Q_i. It ends
      in layer t = tail_j, the last one up to j that makes something saved; u_{k-1} counts only
      inside the segment. It is not less than the first op of backward, while the checkpoint still
      exists;
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
        # The replay's last layer computes y only where that is saved and not the checkpoint j.
        at = np.maximum(self.tail, 1) - 1
        whole = chain.output_saved[at + 1] & (self.tail < np.arange(1, count + 1))
        self.end = np.where(whole, self.replay[at], (before + chain.replay_saved)[at])
        worst = np.maximum(self.kept + chain.backward_saved, before + chain.forward_saving)
        self.last: I64 = np.maximum.accumulate(worst[::-1])[::-1] - before
        """The peak of the segment (i, n], by i. It is never dropped."""

    def dropped(self, start: int) -> I64:
        """The peaks of the segments (start, j] for j = start + 1..n - 1, if they are dropped."""
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
    """For j = 1..n, the last layer that a replay of a segment ending in j has to run: it makes z,
    or a saved y other than y_j. 0 for none."""
    layers = np.arange(1, len(chain) + 1)
    inner: Bools = (chain.saved > 0) | chain.output_saved[1:]
    reached = np.maximum.accumulate(np.where(inner, layers, 0))
    before = np.concatenate((np.zeros(1, np.int64), reached))[:-1]
    return np.where(chain.saved > 0, layers, before).astype(np.int64)
