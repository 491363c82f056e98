"""The optimal order of a small graph, by CP-SAT.

The model minimises the peak. Each operator has a place of its own (all-different), within the
window that its ancestors and descendants leave. Each value has an interval from its maker to its
last user. At each place the bytes of all intervals sum up to at most the peak (cumulative
constraint).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from memplan.order.evaluate import peak, positions
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from memplan.types.trace import I64


class Exact(NamedTuple):
    """An order, and the work that it took in CP-SAT's deterministic time."""

    order: I64
    work: float


class _Leaf:
    """The model of one graph with at least one operator."""

    def __init__(self, graph: Graph, hint: I64) -> None:
        """`hint`: an order to start from; only lower peaks are looked for."""
        self._graph = graph
        self._hint = hint
        self._most = peak(graph, hint)
        self._model = cp_model.CpModel()
        self._places = self._operators()
        self._peak = self._memory()
        self._model.minimize(self._peak)
        self._solver = cp_model.CpSolver()

    def solve(self, seed: int, work: float, seconds: float) -> Exact:
        parameters = self._solver.parameters
        parameters.catch_sigint_signal = False  # it would not give Ctrl-C back to Python
        parameters.num_workers = 1
        parameters.random_seed = seed
        parameters.max_time_in_seconds = seconds
        parameters.max_deterministic_time = work
        status = self._solver.solve(self._model)
        done = self._solver.response_proto.deterministic_time
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Exact(self._hint, done)
        return Exact(np.argsort([self._solver.value(place) for place in self._places]), done)

    def stop(self) -> None:
        """End a running `solve` soon, from another thread."""
        self._solver.stop_search()

    def _operators(self) -> list[cp_model.IntVar]:
        graph, model = self._graph, self._model
        first, last = _windows(graph)
        places = [
            model.new_int_var(int(first[op]), int(last[op]), f"p{op}") for op in range(len(graph))
        ]
        model.add_all_different(places)
        for op, place in enumerate(places):
            for needed in graph.before_of(op).tolist():
                model.add(places[needed] < place)
        for place, at in zip(places, positions(self._hint, len(graph)).tolist(), strict=True):
            model.add_hint(place, at)
        return places

    def _memory(self) -> cp_model.IntVar:
        graph, model = self._graph, self._model
        intervals, bytes_each = [], []
        for value in range(graph.values):
            if not graph.bytes[value]:
                continue
            interval = self._lifetime(value)
            if interval is not None:
                intervals.append(interval)
                bytes_each.append(int(graph.bytes[value]))
        for op in np.flatnonzero(graph.scratch).tolist():
            intervals.append(model.new_fixed_size_interval_var(self._places[op], 1, f"s{op}"))
            bytes_each.append(int(graph.scratch[op]))
        lower = max(bytes_each, default=0)
        most = self._most - 1 - graph.base_bytes
        bound = model.new_int_var(min(lower, most), most, "peak")
        model.add_cumulative(intervals, bytes_each, bound)
        return bound

    def _lifetime(self, value: int) -> cp_model.IntervalVar | None:
        graph, model, count = self._graph, self._model, len(self._graph)
        maker = int(graph.maker[value])
        users = [self._places[op] for op in graph.users_of(value).tolist()]
        start = self._places[maker] if maker >= 0 else 0
        if graph.lasts[value]:
            end: cp_model.LinearExprT = count
        elif not users:
            return model.new_fixed_size_interval_var(start, 1, f"v{value}") if maker >= 0 else None
        elif len(users) == 1:
            end = users[0] + 1
        else:
            last = model.new_int_var(0, count - 1, f"e{value}")
            model.add_max_equality(last, users)
            end = last + 1
        size = model.new_int_var(1, count, f"l{value}")
        return model.new_interval_var(start, size, end, f"v{value}")


def _windows(graph: Graph) -> tuple[I64, I64]:
    """The first and the last place that each operator can have in an order."""
    count = len(graph)
    ancestors, descendants = [0] * count, [0] * count
    for op in range(count):
        for needed in graph.before_of(op).tolist():
            ancestors[op] |= ancestors[needed] | 1 << needed
    for op in reversed(range(count)):
        for needed in graph.before_of(op).tolist():
            descendants[needed] |= descendants[op] | 1 << op
    first = np.array([reached.bit_count() for reached in ancestors], np.int64)
    after = np.array([reached.bit_count() for reached in descendants], np.int64)
    return first, count - 1 - after


def exact_order(graph: Graph, hint: I64, *, seed: int, work: float, deadline: Deadline) -> Exact:
    """The order with the lowest peak, or the best one found within an amount of `work`; `hint`, an
    order, where none has a lower peak.

    Work is CP-SAT's deterministic time; one unit is about a second of a usual CPU. So the answer
    does not depend on the machine's speed, unless the deadline comes first.
    """
    if deadline.passed or work <= 0:
        return Exact(hint, 0.0)
    leaf = _Leaf(graph, hint)
    return deadline.result_of(lambda: leaf.solve(seed, work, deadline.left()), cancel=leaf.stop)
