"""The optimal selection of a small graph, by CP-SAT: the oracle of `solve.py`.

The class of schedules is the very one that a `Selection` can say and `evaluate` judges. A group is
named by its *leader*, the member that backward reads first, so the Booleans `member[w, v]` with w
before v in the order of first reads enumerate every way to group values once. For each leader a
copy of the forward ops says what its replay executes; it is bounded from below only, which suffices
as more execution never saves memory or time. The memory constraints are those of Checkmate (Jain et
al., 2020), written per row and per replayed op.

Variables grow with leaders x ops x values: meant for at most about 25 forward ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ortools.sat.python import cp_model

from memplan.recompute.evaluate import evaluate
from memplan.recompute.selection import Selection, replayable_ops
from memplan.types.solution import Infeasible, Solution, Solved, TimedOut
from memplan.types.step_graph import StepGraph

COST_STEPS = 10**7
"""Seconds are rounded down to this fraction of all forward ops' time."""


def exact_seconds(
    graph: StepGraph, budget_bytes: int, *, deadline_seconds: float, workers: int = 2
) -> Solution[Selection]:
    """Least added seconds a step such that its peak stays within `budget_bytes`. Costs and bounds
    in seconds; the witness of Infeasible is the plain peak in bytes, not the least one."""
    if budget_bytes < graph.rest_peak_bytes:
        return Infeasible("the rest of the step needs more", float(graph.rest_peak_bytes))
    program = _Program(graph)
    program.limit(budget_bytes - graph.base_bytes)
    unit = max(float(graph.ops.seconds[: graph.forward_ops].sum()) / COST_STEPS, 1e-300)
    program.model.minimize(
        sum(int(float(graph.ops.seconds[row]) / unit) * x for (_, row), x in program.runs.items())
    )
    found, bound = program.solve(deadline_seconds, workers)
    if bound is None:
        plain = evaluate(graph, Selection()).peak_bytes
        return Infeasible("no selection keeps the peak within the budget", float(plain))
    bound *= unit * graph.passes
    if found is None:
        return TimedOut(None, bound)
    cost = evaluate(graph, found).added_seconds
    rounding = len(graph) ** 2 * unit * graph.passes
    if cost - bound > rounding:
        return TimedOut(found, bound, cost)
    return Solved(found, cost, bound)


def exact_peak(
    graph: StepGraph, *, deadline_seconds: float, workers: int = 2
) -> Solution[Selection]:
    """The least peak of a step in bytes."""
    program = _Program(graph)
    top = sum(map(int, graph.values.bytes)) * 2 + graph.rest_peak_bytes
    peak = program.model.new_int_var(0, top, "peak")
    program.limit(peak)
    program.model.add(peak >= graph.rest_peak_bytes - graph.base_bytes)
    program.model.minimize(peak)
    found, bound = program.solve(deadline_seconds, workers)
    assert bound is not None, "dropping nothing is a selection"
    bound = max(bound + graph.base_bytes, float(graph.rest_peak_bytes))
    if found is None:
        return TimedOut(None, bound)
    cost = float(evaluate(graph, found).peak_bytes)
    return Solved(found, cost, bound) if bound >= cost else TimedOut(found, bound, cost)


# A linear expression or an int; OR-tools' own alias admits NumPy scalars, which mypy cannot sum.
Linear: TypeAlias = Any


@dataclass
class _Program:
    graph: StepGraph
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    member: dict[tuple[int, int], cp_model.IntVar] = field(default_factory=dict)
    hold: dict[int, cp_model.IntVar] = field(default_factory=dict)
    runs: dict[tuple[int, int], cp_model.IntVar] = field(default_factory=dict)
    """(leader, forward row): executed by the leader's replay."""
    late: dict[tuple[int, int], cp_model.IntVar] = field(default_factory=dict)
    """(value, row): alive for a replay to come, at a row at which it would be gone."""

    def __post_init__(self) -> None:
        self._read_graph()
        for place, leader in enumerate(self.order):
            for value in self.order[place:]:
                self.member[leader, value] = self._bool()
                self.model.add(self.member[leader, value] <= self.member[leader, leader])
        self.unread = {
            v: self._bool() for v in range(self.count) if self.droppable[v] and v not in self.place
        }
        self.hold = {
            v: self._bool() for v in range(self.count) if self.again[v] and v not in self.uses
        }
        for value, dropped in self.unread.items():
            self.model.add(self.hold[value] + dropped <= 1)
        for value in self.order:
            self.model.add(sum(self._members_of(value)) <= 1)
        for leader in self.order:
            self._close(leader)
            self._sources(leader)

    def _read_graph(self) -> None:
        graph = self.graph
        self.count, self.forward = len(graph.values), graph.forward_ops
        self.bytes = list(map(int, graph.values.bytes))
        self.alloc = list(map(int, graph.values.alloc))
        self.free = list(map(int, graph.values.free))
        rows = range(len(graph))
        self.made = [[v for v in range(self.count) if self.alloc[v] == row] for row in rows]
        self.needs = [
            sorted(
                {*graph.ops.reads_of(row), *(set(graph.ops.writes_of(row)) - set(self.made[row]))}
            )
            for row in rows
        ]
        touch = [{*self.needs[row], *self.made[row]} for row in rows]
        self.touch = touch
        makers: list[list[int]] = [[] for _ in range(self.count)]
        for row in range(self.forward):
            for value in {*graph.ops.writes_of(row), *self.made[row]}:
                makers[value].append(row)
        self.makers = makers
        can = replayable_ops(graph)
        self.again = [
            0 <= self.alloc[v] < self.forward and all(can[row] for row in makers[v])
            for v in range(self.count)
        ]
        self.droppable = [bool(d) for d in graph.values.droppable]
        uses: dict[int, list[int]] = {}
        first: list[int] = []
        for row in range(self.forward, len(graph)):
            for value in [*graph.ops.reads_of(row), *graph.ops.writes_of(row)]:
                if value not in uses and self.droppable[value]:
                    first.append(value)
                uses.setdefault(value, []).append(row)
        self.order = first
        self.place = {value: place for place, value in enumerate(first)}
        self.uses = uses
        self.last_forward = [
            max((row for row in range(self.forward) if v in touch[row]), default=-1)
            for v in range(self.count)
        ]

    def _bool(self) -> cp_model.IntVar:
        return self.model.new_bool_var("")

    def _row(self, leader: int) -> int:
        return self.uses[leader][0]

    def _members_of(self, value: int) -> list[cp_model.IntVar]:
        return [self.member[w, value] for w in self.order[: self.place[value] + 1]]

    def _dropped(self, value: int) -> Linear:
        return self.unread[value] if value in self.unread else sum(self._members_of(value))

    def _kept(self, value: int) -> Linear:
        if not self.again[value]:
            return 1
        if value in self.hold:
            return self.hold[value]
        return 1 - self._dropped(value) if self.droppable[value] else 1

    def _there(self, value: int, leader: int) -> Linear:
        """Kept, or left by an earlier replay."""
        return self._kept(value) + self._left(value, leader)

    def _left(self, value: int, leader: int) -> Linear:
        if value not in self.place:
            return 0
        earlier = self.order[: min(self.place[leader], self.place[value] + 1)]
        return sum(self.member[w, value] for w in earlier)

    def _close(self, leader: int) -> None:
        """What the replay executes: bounded from below only."""
        for row in range(self.forward):
            self.runs[leader, row] = self._bool()
        for value in self.order[self.place[leader] :]:
            for row in self.makers[value]:
                self.model.add(self.runs[leader, row] >= self.member[leader, value])
        for reader in range(self.forward):
            runs = self.runs[leader, reader]
            for value in self.needs[reader]:
                there = self._there(value, leader)
                for row in self.makers[value] if self.again[value] else ():
                    if row < reader:
                        self.model.add(self.runs[leader, row] >= runs - there)

    def _sources(self, leader: int) -> None:
        """What the replay begins with lives at its row."""
        for reader in range(self.forward):
            runs = self.runs[leader, reader]
            for value in self.needs[reader]:
                if self._end(value) <= self._row(leader):
                    there = self._there(value, leader)
                    self.model.add(self._late(value, self._row(leader)) >= runs + there - 1)

    def _end(self, value: int) -> int:
        """First row at which it is gone unless a replay needs it: of values that may be dropped,
        whether they are or not, the earlier."""
        if value in self.place:
            return min(self.free[value], self.uses[value][-1] + 1)
        return self.free[value]

    def _late(self, value: int, row: int) -> cp_model.IntVar:
        if (value, row) not in self.late:
            self.late[value, row] = self._bool()
            if row > self._end(value):
                self.model.add(self._late(value, row - 1) >= self.late[value, row])
        return self.late[value, row]

    def _alive(self, row: int, before: int | None = None) -> Iterator[Linear]:
        """Bytes at a row; with `before`, at the start of that leader's replay, before the row's own
        op."""
        leaders = self.order if before is None else self.order[: self.place[before]]
        for value in range(self.count):
            size = self.bytes[value]
            if not size or (before is not None and self.alloc[value] == row >= self.forward):
                continue
            yield from (size * x for x in self._alive_values(value, row, leaders))

    def _alive_values(self, value: int, row: int, leaders: list[int]) -> Iterator[Linear]:
        """Terms that say whether a value is alive at a row; at most one of them is 1."""
        plain = self.alloc[value] <= row < self.free[value]
        if not self.droppable[value]:
            if plain:
                yield 1
            elif (value, row) in self.late:
                yield self.late[value, row]
            return
        if row <= self.last_forward[value]:
            if plain:
                yield 1
            return
        back = [w for w in leaders if (w, value) in self.member and self._row(w) <= row]
        recomputed = sum(self.member[w, value] for w in back)
        if (value, row) not in self.late:
            if plain:
                yield 1 - self._dropped(value)
            if value in self.place and row <= self.uses[value][-1]:
                yield recomputed
            return
        alive = self._bool()
        yield alive
        used = value in self.place and row <= self.uses[value][-1]
        late = 0 if used else self.late[value, row] - 1
        self.model.add(alive >= recomputed + late)
        late = 0 if plain else self.late[value, row] - 1
        self.model.add(alive >= 1 - self._dropped(value) + late)

    def limit(self, budget: Linear) -> None:
        """All memory within `budget`, beside the base bytes."""
        for row in range(len(self.graph)):
            self.model.add(sum(self._alive(row)) <= budget)
        for leader in self.order:
            self._limit_replay(leader, budget)

    def _limit_replay(self, leader: int, budget: Linear) -> None:
        around = sum(self._alive(self._row(leader), leader))
        passing: dict[tuple[int, int], cp_model.IntVar] = {}
        for value in range(self.count):
            if self.again[value] and self.bytes[value]:
                self._passing(leader, value, passing)
        for row in range(self.forward):
            held: list[Linear] = [self.bytes[value] for value in self.made[row]]
            for value in range(self.count):
                if not 0 <= self.alloc[value] < row:
                    continue
                if (leader, value) in self.member:
                    held.append(self.bytes[value] * self.member[leader, value])
                if (value, row) in passing:
                    held.append(self.bytes[value] * passing[value, row])
            self.model.add(around + sum(held) <= budget).only_enforce_if(self.runs[leader, row])

    def _passing(
        self, leader: int, value: int, passing: dict[tuple[int, int], cp_model.IntVar]
    ) -> None:
        """Made by the replay, no member of its group, and touched at a row or later."""
        made = self.runs[leader, self.alloc[value]]
        stays = self._there(value, leader) + self.member.get((leader, value), 0)
        later: cp_model.IntVar | None = None
        for row in range(self.last_forward[value], self.alloc[value], -1):
            now = passing[value, row] = self._bool()
            if later is not None:
                self.model.add(now >= later)
            if value in self.touch[row]:
                self.model.add(now >= self.runs[leader, row] + made - 1 - stays)
            later = now

    def solve(self, deadline_seconds: float, workers: int) -> tuple[Selection | None, float | None]:
        """The best selection found, and the proved bound of the objective: None where there is no
        selection."""
        solver = cp_model.CpSolver()
        solver.parameters.catch_sigint_signal = False  # it would not give Ctrl-C back
        solver.parameters.max_time_in_seconds = deadline_seconds
        solver.parameters.num_workers = workers
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            return None, None
        bound = solver.best_objective_bound
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, max(bound, 0.0)
        return self._selection(solver), bound

    def _selection(self, solver: cp_model.CpSolver) -> Selection:
        groups = [
            frozenset(
                v
                for v in self.order
                if (leader, v) in self.member and solver.boolean_value(self.member[leader, v])
            )
            for leader in self.order
        ]
        groups += [frozenset({v}) for v, x in self.unread.items() if solver.boolean_value(x)]
        held = frozenset(v for v, x in self.hold.items() if solver.boolean_value(x))
        return Selection(tuple(filter(None, groups)), held)
