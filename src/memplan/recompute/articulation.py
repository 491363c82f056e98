"""Finds the values of a forward pass through which all data must go (articulation points).

The time is linear in the edges of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.types.step_graph import Bools, StepGraph
from memplan.types.trace import I64


@dataclass(frozen=True)
class Articulation:
    """The forward rows from `row` on use nothing of the rows before but `value`."""

    value: int
    row: int


@dataclass(frozen=True)
class ForwardUses:
    """How forward uses each value: rows of forward that backward depends on, -1 for none."""

    first: I64
    """First write."""
    written: I64
    """Last write."""
    last: I64
    """Last use, writes included."""
    on_path: Bools
    """Whether forward computes it from a parameter, and backward depends on it."""


def articulations(graph: StepGraph, uses: ForwardUses, longest: int) -> list[Articulation]:
    """The articulation points of the forward's graph of values, in program order.

    A value is an articulation point if all paths from the ops before some row to those from that
    row on lead through it; the first such row is returned. Values are storages, so views and
    in-place writes belong to one value, which must have its final content by then. Some values do
    not count as paths: values that exist before the pass (parameters, inputs), values that are
    computed without parameters (inputs copied to the device, masks, positions), values that
    backward does not depend on (metrics), and values *set aside* because they are in use over more
    than `longest` rows (an encoder's output, which each layer of a decoder reads).

    Program order is a topological order. So a path crosses a row on a value that is made before the
    row and used at it or later; where there is only one such value, it is an articulation point.
    """
    counted = np.flatnonzero(uses.on_path & (uses.last - uses.first <= longest))
    rows = graph.forward_ops
    first, last = uses.first[counted], uses.last[counted]
    crossing = np.zeros(rows + 1, np.int64)
    which = np.zeros(rows + 1, np.int64)
    for column, amount in ((crossing, np.ones_like(counted)), (which, counted)):
        np.add.at(column, first + 1, amount)
        np.subtract.at(column, last + 1, amount)
    crossing, which = np.cumsum(crossing), np.cumsum(which)
    found: list[Articulation] = []
    for row in np.flatnonzero(crossing[:rows] == 1).tolist():
        value = int(which[row])
        if uses.written[value] < row and (not found or found[-1].value != value):
            found.append(Articulation(value, row))
    return found


def forward_uses(graph: StepGraph) -> ForwardUses:
    """How forward uses each value, in time linear in the graph's edges."""
    count = len(graph.values)
    first, written, last = (np.full(count, -1, np.int64) for _ in range(3))
    wanted = np.zeros(count, np.bool_)
    wanted[graph.ops.reads[graph.ops.reads_start[graph.forward_ops] :]] = True
    needed = np.zeros(graph.forward_ops, np.bool_)
    for row in range(graph.forward_ops - 1, -1, -1):
        writes = graph.ops.writes_of(row)
        if not any(wanted[value] for value in writes):
            continue
        needed[row] = True
        for value in graph.ops.reads_of(row):
            wanted[value] = True
    carries = _carries_parameters(graph)
    for row in np.flatnonzero(needed).tolist():
        writes = graph.ops.writes_of(row)
        for value in [*graph.ops.reads_of(row), *writes]:
            last[value] = row
        for value in writes:
            written[value] = row
            if first[value] < 0:
                first[value] = row
    made = (graph.values.alloc >= 0) & (first >= 0)
    return ForwardUses(first, written, last, np.asarray(made & carries & wanted, np.bool_))


def _carries_parameters(graph: StepGraph) -> Bools:
    """Whether a parameter or buffer is part of each value; true for all if none is named."""
    carries = np.array([bool(name) for name in graph.values.name], dtype=np.bool_)
    if not carries.any():
        return ~carries
    for row in range(graph.forward_ops):
        if any(carries[value] for value in graph.ops.reads_of(row)):
            for value in graph.ops.writes_of(row):
                carries[value] = True
    return carries
