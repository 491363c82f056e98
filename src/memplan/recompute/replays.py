"""The replays of a selection, op by op: what runs again, and when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from memplan.recompute.selection import Selection, check_selection, replayable_ops
from memplan.types.step_graph import StepGraph


@dataclass(frozen=True)
class Replay:
    """The replay of one group. Rows and values are numbers of the graph."""

    before: int
    """The backward row right before which it runs."""
    rows: tuple[int, ...]
    """Forward rows, in their order."""
    makes: frozenset[int]
    """Values made that are not in memory before. Other results of its rows are second copies."""
    gives: frozenset[int]
    """Those of `makes` that backward, and perhaps later replays, read."""


def replays(graph: StepGraph, selection: Selection) -> list[Replay]:
    """The replays of a selection, in the order in which they run, as `evaluate` counts them. For
    graphs whose replayable ops write only values that they make.

    Raises ValueError for a selection that is not valid.
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
    """The forward rows that compute the targets from values that are in memory."""
    rows: set[int] = set()
    waiting = list(targets)
    while waiting:
        row = int(graph.values.alloc[waiting.pop()])
        if row not in rows:
            rows.add(row)
            waiting += [value for value in graph.ops.reads_of(row) if value not in there]
    return tuple(sorted(rows))
