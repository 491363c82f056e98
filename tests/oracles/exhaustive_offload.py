"""Every plan of a small graph: each value kept, offloaded or recomputed, in every grouping of what
is recomputed and with every window that makes a difference.

Windows are 0 or sums of offloaded values that follow one another, in the
order of saves or of need: between two of those, a window does what the smaller does.
"""

from __future__ import annotations

from collections.abc import Iterator

from memplan.recompute.selection import Selection
from memplan.recompute.transfers import Saves, Schedule
from memplan.types.step_graph import StepGraph

Groups = tuple[frozenset[int], ...]


def best_plans(graph: StepGraph, bytes_per_second: float) -> list[tuple[int, float]]:
    """Peak bytes and added seconds of the plans that none is better than in both, by peak."""
    saves = Saves(graph, bytes_per_second)
    found: dict[int, float] = {}
    for selection in _selections(graph, saves):
        schedule = Schedule(saves, selection)
        for offloaded in _subsets(schedule.kept):
            chosen = frozenset(offloaded)
            for out in _sums(saves, offloaded):
                for ahead in _sums(saves, schedule.order(offloaded)):
                    judged = schedule.judge(chosen, out, ahead)
                    before = found.get(judged.peak_bytes, float("inf"))
                    found[judged.peak_bytes] = min(before, judged.added_seconds)
    best: list[tuple[int, float]] = []
    for peak, seconds in sorted(found.items()):
        if not best or seconds < best[-1][1]:
            best.append((peak, seconds))
    return best


def least_seconds(plans: list[tuple[int, float]], budget_bytes: int) -> float:
    """Of those within the budget; infinite where none is."""
    return min((s for peak, s in plans if peak <= budget_bytes), default=float("inf"))


def _selections(graph: StepGraph, saves: Saves) -> Iterator[Selection]:
    """With every set of values held that only forward uses; none where nothing is recomputed."""
    values = graph.values
    made = (values.alloc >= 0) & (values.alloc < graph.forward_ops) & (values.bytes > 0)
    used = saves.first_use < len(graph)
    holdable = (made & ~values.droppable & ~used).nonzero()[0].tolist()
    for groups in _groupings(saves.values):
        for held in _subsets(holdable if groups else []):
            yield Selection(groups, frozenset(held))


def _subsets(values: list[int]) -> Iterator[list[int]]:
    for bits in range(1 << len(values)):
        yield [value for place, value in enumerate(values) if bits >> place & 1]


def _groupings(values: list[int]) -> Iterator[Groups]:
    """Every set of disjoint groups of some of the values."""
    if not values:
        yield ()
        return
    for groups in _groupings(values[1:]):
        yield groups
        yield (frozenset({values[0]}), *groups)
        for place, group in enumerate(groups):
            yield (*groups[:place], group | {values[0]}, *groups[place + 1 :])


def _sums(saves: Saves, order: list[int]) -> list[int]:
    sums = {0}
    for first in range(len(order)):
        total = 0
        for value in order[first:]:
            total += saves.bytes[value]
            sums.add(total)
    return sorted(sums)
