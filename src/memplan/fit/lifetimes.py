"""What a capture with a plan in effect tells about lifetimes that the plain one cannot.

In the plain run autograd holds a value from forward to backward, and whether a local variable or a
C++ frame holds it as well does not show. Dropped, it lives as long as those do: logits, for
instance, until the loss is computed, although nothing reads them after the first operator of it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import numpy as np

from memplan.types.step_graph import StepGraph
from memplan.types.trace import I64

_OF_THE_RUNTIME = frozenset(
    {"aten.detach.default", "aten.alias.default", "aten.empty_strided.default"}
)


def with_observed_lifetimes(
    graph: StepGraph, observed: StepGraph, dropped: frozenset[int]
) -> StepGraph:
    """The graph with the forward lifetimes that dropped values turned out to have.

    `observed`: the graph of the same job, captured with `dropped` (values of `graph`) dropped. A
    value that lived on after its last read in forward is read once more, by an operator that
    nothing ever has to repeat; one that lived on into backward is no longer droppable. `graph`
    itself where nothing of that kind is seen, or the two forwards differ.
    """
    freed = _freed_as_observed(graph, observed)
    made = np.where(graph.values.alloc < graph.forward_ops, graph.values.alloc, -1)
    last_read = np.maximum(made, graph.touches.last_forward)
    extra: dict[int, list[int]] = {}
    droppable = graph.values.droppable.copy()
    for value in sorted(dropped):
        end = freed.get(value)
        if end is None or end - 1 <= last_read[value]:
            continue
        if end > graph.forward_ops:
            droppable[value] = False
            continue
        row = _row_never_repeated(graph, int(last_read[value]), end - 1)
        if row is not None:
            extra.setdefault(row, []).append(value)
    if not extra and (droppable == graph.values.droppable).all():
        return graph
    start, reads = _more_reads(graph, extra)
    return replace(
        graph,
        ops=replace(graph.ops, reads_start=start, reads=reads),
        values=replace(graph.values, droppable=droppable),
    )


def _freed_as_observed(graph: StepGraph, observed: StepGraph) -> dict[int, int]:
    """For values of `graph`, the row at which the same value of `observed` was freed: backward's
    first row for values that outlived the calls, the row after it for those that backward still
    had. Rows, except those that the runtime adds, correspond in order, and so do the values of a
    row. Empty where they do not."""
    ours, theirs = _own_rows(graph), _own_rows(observed)
    if [graph.ops.name[row] for row in ours] != [observed.ops.name[row] for row in theirs]:
        return {}
    made, remade = _made_by_row(graph), _made_by_row(observed)
    freed = {}
    for row, other in zip(ours, theirs, strict=False):
        values, twins = made.get(row, []), remade.get(other, [])
        if len(values) == len(twins):
            for value, twin in zip(values, twins, strict=True):
                free = int(observed.values.free[twin])
                place = bisect_left(theirs, free)
                late = free > observed.forward_ops
                freed[value] = ours[place] if place < len(ours) else graph.forward_ops + late
    return freed


def _own_rows(graph: StepGraph) -> list[int]:
    """Forward rows inside calls; what lies around them may differ from step to step."""
    inside = np.flatnonzero(graph.ops.call[: graph.forward_ops] >= 0).tolist()
    return [row for row in inside if graph.ops.name[row] not in _OF_THE_RUNTIME]


def _made_by_row(graph: StepGraph) -> dict[int, list[int]]:
    """Values with memory by the row that makes them."""
    made: dict[int, list[int]] = {}
    for value in np.flatnonzero((graph.values.alloc >= 0) & (graph.values.bytes > 0)).tolist():
        made.setdefault(int(graph.values.alloc[value]), []).append(value)
    return made


def _row_never_repeated(graph: StepGraph, after: int, row: int) -> int | None:
    """The forward row nearest to `row`, at it or behind it if there is one, else before it but
    behind `after`, that no recomputation ever runs: it makes nothing, or lies outside all calls."""
    ops = graph.ops
    nothing = ops.writes_start[1:] == ops.writes_start[:-1]
    never = np.flatnonzero((nothing | (ops.call < 0))[: graph.forward_ops])
    later = never[never >= row]
    if len(later):
        return int(later[0])
    earlier = never[never > after]
    return int(earlier[-1]) if len(earlier) else None


def _more_reads(graph: StepGraph, extra: dict[int, list[int]]) -> tuple[I64, I64]:
    """`reads_start` and `reads` with more values read by some rows."""
    reads: list[int] = []
    start = [0]
    for row in range(len(graph)):
        reads += list(dict.fromkeys([*graph.ops.reads_of(row), *extra.get(row, [])]))
        start.append(len(reads))
    return np.array(start, np.int64), np.array(reads, np.int64)
