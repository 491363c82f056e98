"""Plans for one captured job, each captured again with the plan in effect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from memplan.fit.answer import Attempt
from memplan.fit.budgets import Card, Outcome, first_budget, next_budget
from memplan.fit.judge import least_card
from memplan.fit.levers import recompute_levers
from memplan.fit.lifetimes import with_observed_lifetimes
from memplan.fit.state import State
from memplan.phases import plain_peak, step_graph
from memplan.recompute.evaluate import Evaluation, Evaluator
from memplan.recompute.selection import Selection, to_part
from memplan.types.deadline import Deadline
from memplan.types.solution import Solution, Solved, TimedOut
from memplan.types.step_graph import StepGraph

_MOST_ATTEMPTS = 6
_FIRST_SECONDS = 3.0
_SOLVE_SECONDS = 6.0
"""For a plan; the first one, from which lifetimes are learnt, need not be the best."""
_ENOUGH_SECONDS = 25.0
"""Of search, after which a plan that fits is good enough: a better one takes another capture."""
_WASTEFUL = 1.08
"""A looser budget by so much is worth that capture however long the search took."""


class Solver(Protocol):
    """`memplan.recompute.solve`, or a stand-in."""

    def solve(
        self, graph: StepGraph, budget_bytes: int, *, deadline_seconds: float
    ) -> Solution[Selection]: ...

    def least_peak(self, graph: StepGraph, *, deadline_seconds: float) -> Solution[Selection]: ...


@dataclass(frozen=True)
class Planned:
    """A plan and the job as captured with it."""

    selection: Selection
    evaluator: Evaluator
    """Of the graph that it was planned on."""
    evaluation: Evaluation
    state: State
    outcome: Outcome

    def attempt(self) -> Attempt:
        estimate = self.state.verdict.estimate
        return Attempt(
            budget_bytes=self.outcome.budget,
            planned_bytes=self.evaluation.peak_bytes,
            requested_bytes=estimate.requested_peak_bytes,
            peak_bytes=estimate.peak_bytes,
            high_bytes=estimate.high_bytes,
            least_card_bytes=self.outcome.needed,
            alloc_conf=self.state.verdict.alloc_conf,
            fits=self.outcome.fits,
            added_fraction=self.evaluation.added_fraction,
        )


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
        self.graph = step_graph(base.captured.trace, profile)
        """With the lifetimes that the captures with a plan have shown."""
        needed = least_card(base.captured.trace, profile, base.verdict)
        self._first_budget = first_budget(plain_peak(self.graph), needed, self._card)
        self.planned: list[Planned] = []
        """Every plan that was captured, in order."""
        self._least: Selection | None = None

    def search(self) -> Planned | None:
        """The cheapest plan that fits; None when not even the one of the least peak does."""
        budget: int | None = self._first_budget
        enough = Deadline(_ENOUGH_SECONDS)
        while budget is not None and len(self.planned) < _MOST_ATTEMPTS:
            best = self.best()
            if best is not None and enough.passed and budget < _WASTEFUL * best.outcome.planned:
                break
            found = self._selection(budget)
            if any(found[0] == done.selection for done in self.planned):
                break
            self._try(*found)
            budget = next_budget([planned.outcome for planned in self.planned], self._card)
        return self.best()

    def best(self) -> Planned | None:
        """Of the plans captured so far that fit, the one that adds the least time."""
        fitting = [p for p in self.planned if p.outcome.fits]
        return min(fitting, key=lambda p: p.evaluation.added_seconds, default=None)

    def lowest(self) -> Planned | None:
        """Of the plans captured so far, the one that fits the smallest card."""
        return min(self.planned, key=lambda p: p.outcome.needed, default=None)

    def _selection(self, budget: int) -> tuple[Selection, int]:
        """What to drop, and the budget that this keeps to: 0 where there is none for `budget`."""
        if budget > 0:
            seconds = _SOLVE_SECONDS if self.planned else _FIRST_SECONDS
            solution = self._solver.solve(self.graph, budget, deadline_seconds=seconds)
            selection = _best_of(solution)
            if selection is not None:
                return selection, budget
        if self._least is None:
            solution = self._solver.least_peak(self.graph, deadline_seconds=_SOLVE_SECONDS)
            self._least = _best_of(solution) or Selection()
        return self._least, 0

    def _try(self, selection: Selection, budget: int) -> None:
        graph = self.graph
        evaluator = Evaluator(graph)
        evaluation = evaluator.evaluate(selection)

        part = to_part(
            graph,
            selection,
            budget_bytes=budget,
            peak_bytes=evaluation.peak_bytes,
            added_seconds=evaluation.added_seconds,
        )
        made_from = msgspec.structs.replace(
            self._base.plan.made_from, forward_ops=graph.forward_ops
        )
        state = self._base.trying(recompute=part, made_from=made_from)
        levers = recompute_levers(evaluator, selection, part)
        state = replace(state, levers=(*state.levers, *levers))
        trace, profile = state.captured.trace, state.job.profile
        observed = step_graph(trace, profile)
        self.graph = with_observed_lifetimes(graph, observed, selection.dropped)
        learnt = self.graph is not graph
        self._least = None if learnt else self._least
        self.planned.append(
            Planned(
                selection=selection,
                evaluator=evaluator,
                evaluation=evaluation,
                state=state,
                outcome=Outcome(
                    budget=budget,
                    planned=plain_peak(observed) if learnt else evaluation.peak_bytes,
                    needed=least_card(trace, profile, state.verdict),
                    fits=state.fits,
                    added_fraction=evaluation.added_fraction,
                    least=budget == 0 and not learnt,
                ),
            )
        )


def _best_of(solution: Solution[Selection]) -> Selection | None:
    if isinstance(solution, Solved):
        return solution.solution
    return solution.best if isinstance(solution, TimedOut) else None
