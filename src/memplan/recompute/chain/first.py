"""The first objective: all checkpoints at once, and the dearest segment beside them.

    min over checkpoints 0 = c_0 < … < c_m of   sum of a_c  +  max over r of B(c_r, c_{r+1})

where B(i, j) is what computing and differentiating segment (i, j] holds beside the checkpoints. It
counts checkpoints that the backward has already passed, so it is never below the traced objective
where replays do not overshoot. Solved in O(n³): for each of the O(n²) values t that the dearest
segment can have, the cheapest sum of checkpoints whose segments all stay within t comes from an
O(n) dynamic programme. B grows with j and with falling i, so the starts that reach j from below are
a window whose left end only moves right, and a monotone queue gives its least sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from memplan.recompute.chain.model import Chain
from memplan.recompute.chain.traced import Subset
from memplan.types.solution import Solved
from memplan.types.trace import I64


def least_first_objective(chain: Chain) -> Solved[Subset]:
    """The subset with the least first objective, its `cost` (and the subset's `peak_bytes`): O(n³)
    time, O(n²) memory.

    Sums fall as t rises, so between two values of t with the same sum there is nothing to try, nor
    where the lower t and the sum of the higher one already reach the best. Raises ValueError as
    `Chain.check` does.
    """
    chain.check()
    count = len(chain)
    if not count:
        return _solved(int(chain.output[0]), ())
    costs = _segment_costs(chain)
    limits = np.unique(costs[np.triu_indices(count)])
    keep = [int(bytes_) for bytes_ in chain.output[:count]]
    best: tuple[int, tuple[int, ...]] | None = None
    sums: dict[int, int | None] = {}

    def try_limit(at: int) -> int | None:
        nonlocal best
        if at not in sums:
            found = _cheapest_within(costs, keep, int(limits[at]))
            sums[at] = found[0] if found else None
            if found and (best is None or found[0] + int(limits[at]) < best[0]):
                best = found[0] + int(limits[at]), found[1]
        return sums[at]

    pending = [(0, len(limits) - 1)]
    while pending:
        low, high = pending.pop()
        most, least = try_limit(low), try_limit(high)
        if high - low < 2 or least is None or most == least:
            continue
        if best is not None and int(limits[low]) + least >= best[0]:
            continue
        middle = (low + high) // 2
        pending += [(low, middle), (middle, high)]
    assert best is not None, "the one segment of the whole chain is always within its own cost"
    return _solved(*best)


def first_objective(chain: Chain, checkpoints: Iterable[int]) -> int:
    """Its value in bytes for these boundaries (of 1..n-1), from the definition in O(n²)."""
    starts = [0, *sorted(set(checkpoints) - {0})]
    if not len(chain):
        return int(chain.output[0])
    costs = _segment_costs(chain)
    ends = [*starts[1:], len(chain)]
    dearest = max(int(costs[start, end - 1]) for start, end in zip(starts, ends, strict=True))
    return dearest + sum(int(chain.output[start]) for start in starts)


def _segment_costs(chain: Chain) -> I64:
    """B by start i and end j - 1: the most of D_k and of the forward that saves, over i < k <= j,
    less Q_i; an unsaved y_i is not counted again by its own segment."""
    count = len(chain)
    kept, unsaved = chain.kept[:count], chain.unsaved[:count]
    saving: I64 = kept + unsaved + chain.forward_saving
    worst = np.maximum(kept + chain.backward, saving)
    costs = np.zeros((count, count), dtype=np.int64)
    for start in range(count):
        inside = worst[start:].copy()
        inside[0] = max(
            int(kept[start] + chain.backward[start]), int(saving[start] - unsaved[start])
        )
        costs[start, start:] = np.maximum.accumulate(inside) - kept[start]
    return np.asarray(costs, dtype=np.int64)


def _cheapest_within(costs: I64, keep: list[int], limit: int) -> tuple[int, tuple[int, ...]] | None:
    """The least sum of checkpoints whose segments all cost at most `limit`, with the subset."""
    count = len(keep)
    total = [keep[0]] + [0] * count
    parent = [-1] * (count + 1)
    window: deque[int] = deque()
    """Starts of rising sum and rising boundary."""
    for end in range(1, count + 1):
        while window and total[window[-1]] >= total[end - 1]:
            window.pop()
        window.append(end - 1)
        while window and costs[window[0], end - 1] > limit:
            window.popleft()
        if not window:
            return None
        parent[end] = window[0]
        total[end] = total[window[0]] + (keep[end] if end < count else 0)
    found = []
    at = parent[count]
    while at > 0:
        found.append(at)
        at = parent[at]
    return total[count], tuple(reversed(found))


def _solved(value: int, checkpoints: tuple[int, ...]) -> Solved[Subset]:
    return Solved(Subset(checkpoints, value), cost=float(value), bound=float(value))
