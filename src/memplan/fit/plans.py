"""Plans for one captured job, each captured again with the plan in effect."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Protocol

import msgspec
import numpy as np

from memplan.fit.answer import Lever
from memplan.fit.budgets import Card, Outcome, first_budget, next_budget, room
from memplan.fit.levers import recompute_levers
from memplan.fit.lifetimes import with_observed_lifetimes
from memplan.fit.state import State
from memplan.phases import plain_peak, step_graphs
from memplan.recompute.evaluate import Evaluation, Evaluator
from memplan.recompute.selection import Selection, as_followed, to_part
from memplan.types.solution import Solution
from memplan.types.step_graph import StepGraph

_MOST_ATTEMPTS = 6
_SOLVE_SECONDS = 3.0
"""The longest search for a plan."""
_LOOK_SECONDS = 1.0
"""For a plan whose time is compared only, and which is not captured."""
_NEAR = 0.9
"""Kinds of pass with a peak above this fraction of the first budget are planned."""
_LOWER = 0.99
"""A new lowest peak has to be below this fraction of the lowest peak so far."""


Ahead = Callable[[float], Sequence[Callable[[State], State]]]


def _nothing(_added: float) -> Sequence[Callable[[State], State]]:
    return ()


class Solver(Protocol):
    """`memplan.recompute.solve.Solver`, or a stand-in."""

    def solve(
        self, graph: StepGraph, budget_bytes: int, *, deadline_seconds: float
    ) -> Solution[Selection]: ...

    def least_peak(self, graph: StepGraph, *, deadline_seconds: float) -> Solution[Selection]: ...


@dataclass(frozen=True)
class Planned:
    """A plan and the job as captured with it."""

    selections: list[Selection]
    evaluation: Evaluation
    state: State
    outcome: Outcome


@dataclass(frozen=True)
class _Plan:
    """One that is not captured yet."""

    selections: list[Selection]
    """One for each kind of pass."""
    budget: int
    """0 for the least peak."""
    evaluation: Evaluation
    parts: dict[str, Any]
    levers: list[Lever]


class Planner:
    """Looks for the plan with the least added time whose captured estimate fits the card.

    Each capture corrects the graph that the next plan is made on.

    Raises NoAnswerError for a trace without a backward pass.
    """

    def __init__(self, base: State, solver: Solver) -> None:
        """`base`: the job with what stays in effect in every plan."""
        profile = base.job.profile
        self._base = base
        self._card = Card(profile.total_memory_bytes, profile.context_high_bytes)
        self._solver = solver
        self.graphs = step_graphs(base.captured.trace, profile, 0)
        """The graph of each kind of pass that is planned, the costliest first, with the lifetimes
        that captures with a plan have shown."""
        self._first_budget = first_budget(self._plain_peak(), base.needed, self._card)
        above = int(_NEAR * self._first_budget)
        self.graphs = step_graphs(base.captured.trace, profile, above)
        self.planned: list[Planned] = []
        """Every plan that was captured, in order."""
        self._least: list[Selection] | None = None
        """The selection with the lowest peak of each current graph, and that peak."""
        self._least_peak = 0

    def search(self, ahead: Ahead = _nothing) -> Planned | None:
        """The cheapest plan that fits; None when not even the one of the least peak does. `ahead`:
        levers that may be tried next if plans add so many seconds, whose captures may begin where
        there is room.

        The least peak is captured beside the first budget: it says early that nothing will do, and
        teaches as much. Again, as long as nothing fits, where something was learnt.
        """
        budget: int | None = self._first_budget
        while len(self.planned) < _MOST_ATTEMPTS:
            wanted = [] if budget is None else [budget]
            if self._least is None and self.best() is None:
                wanted.append(0)
            if not self._try_all(wanted, ahead):
                break
            ahead = _nothing
            budget = next_budget([planned.outcome for planned in self.planned], self._card)
        return self.best()

    def row(self, count: int) -> None:
        """Captures plans for so many budgets, spread evenly between the least peak and the plain
        one."""
        self._selection(0)
        budgets = np.linspace(self._least_peak, self._plain_peak(), count + 1, endpoint=False)
        self._try_all([0, *budgets[1:].astype(int).tolist()])

    def _try_all(self, budgets: Sequence[int], ahead: Ahead = _nothing) -> bool:
        """Side by side; whether there was anything new."""
        known = [planned.selections for planned in self.planned]
        plans = []
        for wanted in sorted(budgets):  # the least peak first: no budget below it is searched for
            selections, budget = self._selection(wanted)
            if selections in known:
                continue
            known.append(selections)
            plan = self._plan(selections, budget)
            least = min((p.outcome.planned for p in self.planned), default=math.inf)
            if budget or plan.evaluation.peak_bytes < _LOWER * least:
                plans.append(plan)
                self._base.ahead(partial(State.trying, **plan.parts))
        added = (plan.evaluation.added_seconds for plan in plans if plan.budget)
        for lever in ahead(min(added, default=math.inf)):
            self._base.ahead(lever)
        for plan in sorted(plans, key=lambda plan: -plan.budget):
            self._try(plan)
        return bool(plans)

    def best(self) -> Planned | None:
        """The captured plan that fits and adds the least time."""
        fitting = [p for p in self.planned if p.outcome.fits]
        return min(fitting, key=lambda p: p.evaluation.added_seconds, default=None)

    def lowest(self) -> Planned | None:
        """The captured plan that fits the smallest card."""
        return min(self.planned, key=lambda p: p.outcome.needed, default=None)

    def added_with(self, freed: int) -> float | None:
        """Seconds that a plan would add if so many bytes less of what always lies on the card did;
        None where none is found, and where nothing has been captured to tell from."""
        known = self.best() or self.lowest()
        if known is None:
            return None
        selections = self._within(room(known.outcome, self._card) + freed, _LOOK_SECONDS)
        return None if selections is None else self._evaluated(selections).added_seconds

    @property
    def offloads(self) -> bool:
        """Whether values may be sent to the host instead: with one kind of pass, one at a time."""
        one, *more = self.graphs
        return not (more or one.kinds or one.others)

    def _plain_peak(self) -> int:
        return max(map(plain_peak, self.graphs))

    def _selection(self, budget: int) -> tuple[list[Selection], int]:
        """What to drop, and the budget that this keeps to: 0 where there is none for `budget`."""
        if budget > 0 and (self._least is None or budget >= self._least_peak):
            selections = self._within(budget)
            if selections is not None:
                return selections, budget
        if self._least is None:
            least = self._solver.least_peak
            each = [self._solved(partial(least, g), _SOLVE_SECONDS) for g in self.graphs]
            self._least = [selection or Selection() for selection in each]
            self._least_peak = self._evaluated(self._least).peak_bytes
            if len(self.graphs) > 1:  # the others need not go as far as the one that has most
                self._least = self._within(self._least_peak) or self._least
        return self._least, 0

    def _within(self, budget: int, seconds: float = _SOLVE_SECONDS) -> list[Selection] | None:
        selections = []
        for graph in self.graphs:
            selection = self._solved(partial(self._solver.solve, graph, budget), seconds)
            if selection is None:
                return None
            selections.append(selection)
        return selections

    def _evaluated(self, selections: list[Selection]) -> Evaluation:
        """The evaluation of all passes of the step."""
        followed = as_followed(self.graphs, selections)
        each = [Evaluator(g).evaluate(s) for g, s in zip(self.graphs, followed, strict=True)]
        return replace(
            max(each, key=lambda one: one.peak_bytes),
            added_seconds=sum(one.added_seconds for one in each),
            plain_seconds=sum(one.plain_seconds for one in each),
        )

    def _solved(self, solve: Callable[..., Solution[Selection]], most: float) -> Selection | None:
        search, began = self._base.job.search, time.process_time()
        found = solve(deadline_seconds=search.solving_seconds(most)).best
        search.solved(began)
        return found

    def _plan(self, selections: list[Selection], budget: int) -> _Plan:
        self._base.job.search.tried.append("recompute")
        evaluation = self._evaluated(selections)
        parts, levers = [], []
        for graph, selection in zip(self.graphs, selections, strict=True):
            part = to_part(
                graph,
                selection,
                budget_bytes=budget,
                peak_bytes=evaluation.peak_bytes,
                added_seconds=evaluation.added_seconds,
            )
            parts.append(part)
            levers += recompute_levers(Evaluator(graph), selection, part)
        part = msgspec.structs.replace(
            parts[0],
            groups=[group for part in parts for group in part.groups],
            hold=[value for part in parts for value in part.hold],
        )
        forward_ops = self.graphs[0].forward_ops
        made_from = self._base.plan.made_from
        made_from = msgspec.structs.replace(made_from, forward_ops=forward_ops)
        parts_of_plan = {"recompute": part, "made_from": made_from}
        return _Plan(selections, budget, evaluation, parts=parts_of_plan, levers=levers)

    def _try(self, plan: _Plan) -> None:
        selections, evaluation = plan.selections, plan.evaluation
        state = self._base.trying(**plan.parts)
        state = state.with_levers(*state.levers, *plan.levers)
        state.attempted(plan.budget, evaluation.peak_bytes, evaluation.added_fraction)
        before = self.graphs
        observed = step_graphs(state.captured.trace, state.job.profile, 0)
        dropped = [selection.dropped for selection in as_followed(self.graphs, selections)]
        for one in observed:
            self.graphs = list(map(with_observed_lifetimes, self.graphs, repeat(one), dropped))
        learnt = any(now is not then for now, then in zip(self.graphs, before, strict=True))
        self._least = None if learnt else self._least
        peak = max(map(plain_peak, observed)) if learnt else evaluation.peak_bytes
        self.planned.append(
            Planned(
                selections,
                evaluation,
                state,
                Outcome(
                    budget=plan.budget,
                    planned=peak,
                    needed=state.needed,
                    fits=state.fits,
                    added_fraction=evaluation.added_fraction,
                    least=plan.budget == 0 and not learnt,
                ),
            )
        )
