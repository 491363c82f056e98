"""The values of a forward pass that everything must go through, in time linear in its edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.types.step_graph import Bools, StepGraph
from memplan.types.trace import I64


@dataclass(frozen=True)
class Articulation:
    """`value` alone carries what the forward rows before `row` computed to those from `row` on."""

    value: int
    row: int


@dataclass(frozen=True)
class ForwardUses:
    """By value; rows of the forward that backward depends on, -1 where there is none."""

    first: I64
    """First write."""
    written: I64
    """Last write."""
    last: I64
    """Last use, writes included."""
    on_path: Bools
    """Made by a parameter and others in this forward, and backward depends on it."""


def articulations(graph: StepGraph, uses: ForwardUses, longest: int) -> list[Articulation]:
    """The articulation points of the forward's graph of values, in program order.

    A value is one if each path that leads from the ops before some row to those from it on leads
    through it; the first such row is given. Values are storages, so views and in-place writes are
    steps of one value, which must be final by then. Not on any path: what is there before the pass
    (parameters, inputs), values that no parameter has a part in (inputs copied to the device,
    masks, positions), whatever backward does not depend on (metrics), and values *set aside*, which
    are in use over more than `longest` rows (what an encoder gives to each layer of a decoder).

    Program order is a topological order, so a path crosses a row on a value that is made before
    the row and used from it on: where that is one value only, it is an articulation point.
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
    """Linear in the graph's edges."""
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
    """By value: whether a parameter or buffer has a part in it. All, where nothing is named."""
    carries = np.array([bool(name) for name in graph.values.name], dtype=np.bool_)
    if not carries.any():
        return ~carries
    for row in range(graph.forward_ops):
        if any(carries[value] for value in graph.ops.reads_of(row)):
            for value in graph.ops.writes_of(row):
                carries[value] = True
    return carries
