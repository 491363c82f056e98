"""STAlloc's offline plan, the named baseline (Huang et al., arXiv 2507.16274).

1. HomoPhase groups: requests that share the phase of allocation and the phase of release are packed
   together, in the order of their beginnings, each at the lowest place that is free.
2. Fusion: the smaller of two groups with a phase in common is inserted into the larger one,
   latest-ending request first, each at the lowest free address, where that improves the
   time-memory product: the sum of size x lifetime over height x span.
3. HomoSize groups: a fused group is one request of its height and span. Requests of one size are
   sorted by their beginning; each goes to the layer whose last end is the latest before it, else to
   a new layer.
4. Globally, sizes descend: smaller requests first fill the gaps that the layers of larger ones
   leave, and the rest open layers of their own.

Written from the paper's description.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass

import numpy as np

from bench.layout.greedy import lowest_gap
from memplan.layout.problem import Layout, Problem, make_layout
from memplan.types.trace import I64


@dataclass
class _Group:
    """Requests packed together: rows of the problem, with offsets within the group."""

    rows: I64
    offsets: I64
    lower: int
    upper: int
    height: int
    product: int
    """Sum of size x lifetime."""

    @property
    def area(self) -> int:
        return self.height * (self.upper - self.lower)


@dataclass
class _Layer:
    """A strip of the final layout and the gaps in time that it leaves, as (end, start)."""

    offset: int
    size: int
    gaps: list[tuple[int, int]]


def stalloc(problem: Problem, phase_start: I64, phase_end: I64) -> Layout:
    """Offsets for the requests of a step; the phases are those of allocation and of release.

    Raises ValueError for fixed buffers and twins, which the method does not have.
    """
    if (problem.fixed >= 0).any() or (problem.twin >= 0).any():
        raise ValueError("STAlloc's plan cannot place fixed buffers or twins")
    groups = _fused(problem, _phase_groups(problem, phase_start, phase_end))
    offsets = np.zeros(len(problem), np.int64)
    step = int(problem.alignment.max(initial=1))
    for group, base in zip(groups, _layered(groups, step), strict=True):
        offsets[group.rows] = base + group.offsets
    return make_layout(problem, offsets)


def _phase_groups(
    problem: Problem, phase_start: I64, phase_end: I64
) -> list[tuple[int, int, _Group]]:
    pairs = np.stack((phase_start, phase_end), axis=1)
    found, number = np.unique(pairs, axis=0, return_inverse=True)
    number = number.reshape(-1)
    order = np.argsort(number, kind="stable")
    edges = np.searchsorted(number[order], np.arange(len(found) + 1))
    return [
        (int(first), int(last), _packed(problem, order[edges[at] : edges[at + 1]]))
        for at, (first, last) in enumerate(found.tolist())
    ]


def _packed(problem: Problem, rows: I64) -> _Group:
    """Requests in the order of their beginnings, each at the lowest free place."""
    rows = rows[np.argsort(problem.lower[rows], kind="stable")]
    offsets = np.zeros(len(rows), np.int64)
    alive: list[tuple[int, int, int]] = []
    for at, row in enumerate(rows.tolist()):
        now, size, step = (int(c[row]) for c in (problem.lower, problem.size, problem.alignment))
        alive = [one for one in alive if one[2] > now]
        offset = 0
        for start, end, _ in alive:
            if offset + size <= start:
                break
            offset = max(offset, -(-end // step) * step)
        offsets[at] = offset
        insort(alive, (offset, offset + size, int(problem.upper[row])))
    return _group(problem, rows, offsets)


def _group(problem: Problem, rows: I64, offsets: I64) -> _Group:
    lower, upper, size = problem.lower[rows], problem.upper[rows], problem.size[rows]
    return _Group(
        rows=rows,
        offsets=offsets,
        lower=int(lower.min()),
        upper=int(upper.max()),
        height=int((offsets + size).max()),
        product=int((size.astype(object) * (upper - lower)).sum()),
    )


def _fused(problem: Problem, groups: list[tuple[int, int, _Group]]) -> list[_Group]:
    """Neighbours are tried in the order of their phases, as long as fusing improves."""
    left = list(groups)
    done: list[_Group] = []
    while left:
        first, last, group = left.pop(0)
        at = 0
        while at < len(left):
            other_first, other_last, other = left[at]
            fused = None
            if first in (other_first, other_last) or last in (other_first, other_last):
                fused = _inserted(problem, group, other)
            if fused is None:
                at += 1
            else:
                group = fused
                first, last = min(first, other_first), max(last, other_last)
                del left[at]
        done.append(group)
    return done


def _inserted(problem: Problem, one: _Group, other: _Group) -> _Group | None:
    """Both as one group, where its time-memory product is higher than theirs together."""
    large, small = (one, other) if one.area >= other.area else (other, one)
    rows = np.concatenate((large.rows, small.rows))
    offsets = np.concatenate((large.offsets, np.zeros(len(small.rows), np.int64)))
    lower, upper, size = problem.lower[rows], problem.upper[rows], problem.size[rows]
    count = len(large.rows)
    order = np.argsort(-upper[count:], kind="stable") + count
    placed = np.arange(len(rows)) < count
    for at in order.tolist():
        together = placed & (lower < upper[at]) & (lower[at] < upper)
        step = int(problem.alignment[rows[at]])
        offsets[at] = lowest_gap(offsets[together], size[together], int(size[at]), step)
        placed[at] = True
    fused = _group(problem, rows, offsets)
    better = fused.product * (one.area + other.area) > (one.product + other.product) * fused.area
    return fused if better else None


def _layered(groups: list[_Group], step: int) -> list[int]:
    """An offset for each group: sizes descend, gaps of larger layers first, then layers."""
    bases = [0] * len(groups)
    layers: list[_Layer] = []
    top = 0
    by_size: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        by_size.setdefault(-(-group.height // step) * step, []).append(number)
    for size in sorted(by_size, reverse=True):
        own: list[_Layer] = []
        ends: list[tuple[int, int]] = []  # (last end, layer of this size)
        for number in sorted(by_size[size], key=lambda n: groups[n].lower):
            group = groups[number]
            filled = _fill(layers, group, size)
            if filled is not None:
                bases[number] = filled
                continue
            at = bisect_right(ends, (group.lower, len(own)))
            if at:
                last, which = ends.pop(at - 1)
                own[which].gaps[-1] = (group.lower, last)
            else:
                which = len(own)
                own.append(_Layer(top, size, [(group.lower, -(1 << 62))]))
                top += size
            own[which].gaps.append((1 << 62, group.upper))
            insort(ends, (group.upper, which))
            bases[number] = own[which].offset
        layers += own
    return bases


def _fill(layers: list[_Layer], group: _Group, size: int) -> int | None:
    """Put a group into a gap of a larger layer, the lowest one; what it leaves above itself in the
    layer is a layer of its own over that gap."""
    for layer in layers:
        if layer.size < size:
            continue
        for at, (end, start) in enumerate(layer.gaps):
            if start <= group.lower and group.upper <= end:
                del layer.gaps[at]
                layer.gaps += [(group.lower, start)] if start < group.lower else []
                layer.gaps += [(end, group.upper)] if group.upper < end else []
                if size < layer.size:
                    rest = _Layer(layer.offset + size, layer.size - size,
                                  [(group.upper, group.lower)])  # fmt: skip
                    layers.append(rest)
                return layer.offset
    return None
