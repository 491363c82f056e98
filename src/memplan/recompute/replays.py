"""What a selection runs again, and when: the replays that `evaluate` counts, op by op."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from memplan.recompute.selection import Selection, check_selection, replayable_ops
from memplan.types.step_graph import StepGraph


@dataclass(frozen=True)
class Replay:
    """One group's. Rows and values are numbers of the graph."""

    before: int
    """The backward row right before which it runs."""
    rows: tuple[int, ...]
    """Forward rows, in their order."""
    makes: frozenset[int]
    """Values that are not there when it begins. What else its rows make is a second copy."""
    gives: frozenset[int]
    """Of these, what backward reads, and later replays may."""


def replays(graph: StepGraph, selection: Selection) -> list[Replay]:
    """In the order they run. The graph's replayable ops write nothing but what they make.

    Raises ValueError for a selection that says what cannot be.
    """
    check_selection(graph, selection)
    first = graph.touches.first_backward.tolist()
    used = {value for value, row in enumerate(first) if row < len(graph)}
    group_of = {value: group for group in selection.groups for value in group & used}
    alloc, can = graph.values.alloc.tolist(), replayable_ops(graph).tolist()
    of: dict[int, list[int]] = defaultdict(list)
    for value, row in enumerate(alloc):
        of[row].append(value)
    changed = {
        value
        for row in range(graph.forward_ops)
        if not can[row]
        for value in graph.ops.writes_of(row)
    }
    there = {
        value
        for value, row in enumerate(alloc)
        if value not in selection.dropped
        and (
            not (0 <= row < graph.forward_ops and can[row])
            or value in changed
            or value in used
            or value in selection.held
        )
    }
    found = []
    for row in range(graph.forward_ops, len(graph)):
        for group in dict.fromkeys(group_of[v] for v in _touched(graph, row) if v in group_of):
            gives = group & used
            if min(first[value] for value in gives) == row:
                rows = _rows(graph, gives, there)
                made = frozenset(value for op in rows for value in of[op])
                found.append(Replay(row, rows, made - there, gives))
                there |= gives
    return found


def _touched(graph: StepGraph, row: int) -> list[int]:
    return [*graph.ops.reads_of(row), *graph.ops.writes_of(row)]


def _rows(graph: StepGraph, targets: frozenset[int], there: set[int]) -> tuple[int, ...]:
    """Forward rows that make the targets out of what is there."""
    rows: set[int] = set()
    waiting = list(targets)
    while waiting:
        row = int(graph.values.alloc[waiting.pop()])
        if row not in rows:
            rows.add(row)
            waiting += [value for value in graph.ops.reads_of(row) if value not in there]
    return tuple(sorted(rows))
