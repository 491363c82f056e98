"""Chooses what to keep between forward and backward, by CP-SAT on a relaxation of the problem.

The constraints: a value that backward reads is kept, or every op that makes it runs again. For an
op that runs again, each input is kept, or the makers of that input run again, too. At some chosen
rows, the ops that have yet to run again must find their inputs among the values alive there, and
these values must fit the budget.

It is a relaxation because the memory of the replays themselves is left out and an op that runs
again runs only once. So no selection within the budget adds less time than the optimum, and the
optimum is only a proposal, which `evaluate` judges.

Variables for the set of kept values are from Checkmate (Jain et al., 2020), which also schedules
the ops; here constraints at rows take the place of a schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from ortools.sat.python import cp_model

from memplan.recompute.selection import Selection, replayable_ops
from memplan.types.step_graph import StepGraph

COST_STEPS = 10**7
"""Time counts in units of the forward ops' total time divided by this, rounded down."""
TIE = 1 << 12
"""The objective breaks ties: so many values held or recomputed early weigh as much as one unit."""


@dataclass(frozen=True)
class KeepSet:
    proposals: tuple[Selection, ...]
    """Selections that drop the same values in different groups. Empty if none was found in time."""
    bound: float
    """Every selection within the budget adds at least so many seconds to a pass."""


@dataclass
class KeepSetProblem:
    """The relaxation for one graph and any budget. Values and rows are numbers of the graph."""

    graph: StepGraph
    makers: list[list[int]] = field(init=False)
    """The forward rows that write each value."""
    again: list[bool] = field(init=False)
    """Whether replays can make each value."""
    last_forward: list[int] = field(init=False)
    first_use: list[int] = field(init=False)
    """The first backward row that reads or writes each value; the number of rows for none."""
    last_use: list[int] = field(init=False)

    def __post_init__(self) -> None:
        graph, count, forward = self.graph, len(self.graph.values), self.graph.forward_ops
        self.makers = [[] for _ in range(count)]
        for row in range(forward):
            for value in graph.ops.writes_of(row):
                self.makers[value].append(row)
        self.last_forward = graph.touches.last_forward.tolist()
        self.first_use = graph.touches.first_backward.tolist()
        self.last_use = graph.touches.last_backward.tolist()
        self.can = replayable_ops(graph).tolist()
        alloc = graph.values.alloc.tolist()
        self.again = [
            0 <= alloc[value] < forward and all(self.can[row] for row in self.makers[value])
            for value in range(count)
        ]
        self.droppable = graph.values.droppable.tolist()

    def touched(self, row: int) -> set[int]:
        """Values that an op reads or writes."""
        return {*self.graph.ops.reads_of(row), *self.graph.ops.writes_of(row)}

    def choose(
        self,
        budget_bytes: int,
        rows: Iterable[int],
        *,
        effort: float,
        deadline_seconds: float,
        hint: Selection,
    ) -> KeepSet:
        """The quickest set of kept values whose bytes are within the budget at `rows`.

        `effort` is CP-SAT's deterministic time (about seconds): the same call gives the same answer
        unless the deadline comes first. `hint`: a selection to start from.
        """
        program = _Program(self)
        for row in rows:
            program.limit(row, budget_bytes)
        program.hint(hint)
        solver = cp_model.CpSolver()
        solver.parameters.catch_sigint_signal = False  # it would not give Ctrl-C back
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = effort
        solver.parameters.max_time_in_seconds = deadline_seconds
        status = solver.solve(program.whole())
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            bound = float("inf") if status == cp_model.INFEASIBLE else 0.0
            return KeepSet((), bound)
        return KeepSet(program.proposals(solver), program.seconds(solver.best_objective_bound))


class _Program:
    def __init__(self, problem: KeepSetProblem) -> None:
        self.problem = problem
        graph, model = problem.graph, cp_model.CpModel()
        self.model = model
        unread = len(graph)
        self.keep = {
            value: model.new_bool_var("")
            for value, again in enumerate(problem.again)
            if again and (problem.droppable[value] or problem.first_use[value] == unread)
        }
        self.run = {
            row: model.new_bool_var("") for row in range(graph.forward_ops) if problem.can[row]
        }
        for value, keep in self.keep.items():
            if problem.first_use[value] < unread:
                for row in problem.makers[value]:
                    model.add_bool_or(keep, self.run[row])
        for row, run in self.run.items():
            for value, makers in self._inputs(row):
                for maker in makers:
                    model.add_bool_or(run.negated(), self.run[maker], self.keep[value])
        self.unwanted = [k for v, k in self.keep.items() if not problem.droppable[v]]
        seconds = graph.ops.seconds[: graph.forward_ops]
        self.unit = max(float(seconds.sum()) / COST_STEPS, 1e-300)
        self.cost = sum(int(seconds[row] / self.unit) * run for row, run in self.run.items())

    def _inputs(self, row: int) -> Iterator[tuple[int, list[int]]]:
        """The inputs of an op that runs again, each with the earlier rows that make it. Inputs that
        are in memory in any case are left out."""
        problem = self.problem
        for value in sorted(problem.touched(row)):
            if value in self.keep and problem.graph.values.alloc[value] != row:
                yield value, [maker for maker in problem.makers[value] if maker < row]

    def limit(self, row: int, budget_bytes: int) -> None:
        """Constrain the values alive at a row, without the replays before it, to the budget."""
        problem, values, model = self.problem, self.problem.graph.values, self.model
        plain = ((values.alloc <= row) & (row < values.free)).tolist()
        fixed, terms = self.problem.graph.base_bytes, []
        alive: dict[int, cp_model.IntVar] = {}
        """Values whose presence at this row depends on the solution."""
        for value, size in enumerate(values.bytes.tolist()):
            used = problem.first_use[value] <= row <= problem.last_use[value]
            if value not in self.keep or row <= problem.last_forward[value] or used:
                fixed += size * plain[value]
                continue
            alive[value] = model.new_bool_var("")
            kept_only = not problem.droppable[value] or row < problem.graph.forward_ops
            if kept_only:
                model.add_implication(alive[value], self.keep[value])
            if plain[value] and not problem.droppable[value]:
                fixed += size
            elif size:
                terms.append(size * alive[value])
            if plain[value] and problem.droppable[value]:
                model.add_implication(self.keep[value], alive[value])
            if not kept_only:
                early = model.new_bool_var("")
                model.add_bool_or(alive[value].negated(), self.keep[value], early)
                self.unwanted.append(early)
        self._later(row, alive)
        model.add(sum(terms) <= budget_bytes - fixed)

    def _later(self, row: int, alive: dict[int, cp_model.IntVar]) -> None:
        """Constrain ops that run again after a row to start from the values alive at it."""
        problem, model = self.problem, self.model
        runs = {op: model.new_bool_var("") for op in self.run}
        for op, run in runs.items():
            model.add_implication(run, self.run[op])
            for value, makers in self._inputs(op):
                used = problem.first_use[value] <= row <= problem.last_use[value]
                if not used:
                    found = alive.get(value, self.keep[value])
                    for maker in makers:
                        model.add_bool_or(run.negated(), runs[maker], found)
        for value, keep in self.keep.items():
            if row < problem.first_use[value] < len(problem.graph):
                for maker in problem.makers[value]:
                    model.add_bool_or(alive.get(value, keep), runs[maker])

    def whole(self) -> cp_model.CpModel:
        """The model with its objective. To be called after all `limit` calls."""
        self.model.minimize(TIE * self.cost + sum(self.unwanted))
        return self.model

    def seconds(self, objective: float) -> float:
        """The seconds that a lower bound of the objective proves."""
        return max(0.0, (objective - len(self.unwanted)) / TIE) * self.unit

    def hint(self, selection: Selection) -> None:
        dropped = selection.dropped
        for value, keep in self.keep.items():
            droppable = self.problem.droppable[value]
            kept = value not in dropped if droppable else value in selection.held
            self.model.add_hint(keep, kept)

    def proposals(self, solver: cp_model.CpSolver) -> tuple[Selection, ...]:
        """Two selections: each dropped value is a group; or those whose replays share ops are."""
        kept = {value for value, keep in self.keep.items() if solver.boolean_value(keep)}
        drops = [v for v in self.keep if self.problem.droppable[v] and v not in kept]
        held = frozenset(v for v in kept if not self.problem.droppable[v])
        rows = [row for row, run in self.run.items() if solver.boolean_value(run)]
        single = tuple(frozenset({value}) for value in drops)
        joined = tuple(self._joined(drops, rows, kept))
        return tuple(dict.fromkeys((Selection(joined, held), Selection(single, held))))

    def _joined(self, drops: list[int], rows: list[int], kept: set[int]) -> list[frozenset[int]]:
        """Dropped values, grouped by connected components of the ops that run again and the values
        that pass between these."""
        above: dict[int, int] = {}

        def root(value: int) -> int:
            while (parent := above.setdefault(value, value)) != value:
                above[value] = value = above.setdefault(parent, parent)
            return value

        runs = set(rows)
        for row in rows:
            passed = [
                value
                for value in self.problem.touched(row)
                if value not in kept and not runs.isdisjoint(self.problem.makers[value])
            ]
            for first, second in pairwise(passed):
                above[root(first)] = root(second)
        groups: dict[int, set[int]] = {}
        for value in drops:
            groups.setdefault(root(value), set()).add(value)
        return [frozenset(group) for group in groups.values()]
