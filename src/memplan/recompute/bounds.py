"""Proven lower bounds on the peak and on the added seconds of every selection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.recompute.blocks import alive_bytes
from memplan.types.step_graph import F64, StepGraph
from memplan.types.trace import I64


@dataclass(frozen=True)
class _Relief:
    """Droppable values with the ops that allocate them. One run gives all values of an op."""

    values: I64
    item: I64
    """The index in `seconds` of each value's op."""
    seconds: F64
    """Seconds of each op that a drop runs again; 0 where backward reads none of its values."""
    after_forward: I64
    """First row at which a dropped value is not in memory."""
    first_use: I64
    last_use: I64
    """First and last backward row that touch it. Between them it is in memory even if dropped."""


class Bounds:
    """Bounds for one graph.

    A dropped value saves bytes at the rows between its last use in forward and its first in
    backward, and at those after its last use. It costs at least one run of the op that made it.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        everything = np.ones(len(graph.values), dtype=np.bool_)
        self.plain = alive_bytes(graph, everything)
        self.relief = _relief(graph)
        self.least_peak = self._least_peak()
        self._least_seconds: dict[tuple[int, float], float] = {}

    def _least_peak(self) -> int:
        relief, values = self.relief, self.graph.values
        change = np.zeros(len(self.graph) + 1, dtype=np.int64)
        for begin, end in (
            (relief.after_forward, relief.first_use),
            (np.maximum(relief.last_use + 1, relief.after_forward), values.free[relief.values]),
        ):
            end = np.minimum(end, values.free[relief.values])
            real = end > begin
            size = values.bytes[relief.values[real]]
            np.add.at(change, begin[real], size)
            np.add.at(change, end[real], -size)
        least = self.plain - np.cumsum(change)[:-1]
        least -= self.graph.others * int(values.bytes[relief.values].sum())
        top = int(least.max() if len(least) else 0) + self.graph.base_bytes
        return max(top, self.graph.rest_peak_bytes)

    def least_seconds(self, budget_bytes: int, bytes_per_second: float = 0.0) -> float:
        """Seconds that every selection within the budget adds to a step; infinite if none exists.

        For each row above the budget this is a fractional knapsack: the bytes above the budget are
        taken from values that are not in memory there once they are dropped, the cheapest first.
        With a link to the host of `bytes_per_second`, the bytes that it can have moved by then cost
        nothing, and waiting for it moves more.
        """
        least = self.graph.rest_peak_bytes if bytes_per_second else self.least_peak
        if budget_bytes < least:
            return float("inf")
        key = budget_bytes, bytes_per_second
        if key not in self._least_seconds:
            self._least_seconds[key] = self._row_by_row(*key)
        return self._least_seconds[key]

    def _row_by_row(self, budget_bytes: int, bytes_per_second: float) -> float:
        started = np.cumsum(self.graph.ops.seconds) - self.graph.ops.seconds
        excess = self.plain + self.graph.base_bytes - budget_bytes - started * bytes_per_second
        rows = np.flatnonzero(excess > 0).tolist()
        return max(
            (self._row_seconds(row, float(excess[row]), bytes_per_second) for row in rows),
            default=0.0,
        ) * (self.graph.passes)

    def _row_seconds(self, row: int, excess: float, rate: float) -> float:
        """The least seconds to drop or move `excess` bytes at a row."""
        relief, values = self.relief, self.graph.values
        there = (relief.after_forward <= row) & (row < values.free[relief.values])
        there &= (row < relief.first_use) | (row > relief.last_use)
        size = np.zeros(len(relief.seconds), dtype=np.int64)
        relieved = there + self.graph.others  # by this pass and by those in flight
        np.add.at(size, relief.item, relieved * values.bytes[relief.values])
        items = np.flatnonzero(size)
        price = relief.seconds[items] / size[items]
        if rate and row < self.graph.forward_ops:
            items, price = items[price < 1 / rate], price[price < 1 / rate]
        items = items[np.argsort(price, kind="stable")]
        seconds = np.append(0.0, np.cumsum(relief.seconds[items]))
        total = np.append(0.0, np.cumsum(size[items]))
        if row >= self.graph.forward_ops:  # while ops run again, the link moves more
            total = total + rate * seconds
        if total[-1] < excess:
            return float(seconds[-1] + (excess - total[-1]) / rate) if rate else float("inf")
        return float(np.interp(excess, total, seconds))


def _relief(graph: StepGraph) -> _Relief:
    touches = graph.touches
    last_use = touches.last_backward
    values = np.flatnonzero(graph.values.droppable)
    ops, item = np.unique(graph.values.alloc[values], return_inverse=True)
    paid = graph.ops.seconds[ops].copy()
    free = np.ones(len(ops), dtype=np.bool_)
    free[item[last_use[values] >= 0]] = False
    mixed = np.zeros(len(ops), dtype=np.bool_)
    mixed[item[last_use[values] < 0]] = True
    paid[free | mixed] = 0.0
    return _Relief(
        values,
        np.asarray(item, dtype=np.int64),
        paid,
        np.maximum(graph.values.alloc, touches.last_forward)[values] + 1,
        touches.first_backward[values],
        last_use[values],
    )
