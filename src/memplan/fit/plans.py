"""Plans for one captured job, each captured again with the plan in effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from memplan import __version__
from memplan.capturing.options import ScriptTarget
from memplan.fit.answer import Attempt
from memplan.fit.budgets import Card, Outcome, first_budget, next_budget
from memplan.fit.judge import Verdict, judge, least_card
from memplan.fit.lifetimes import with_observed_lifetimes
from memplan.phases import find_steps, plain_peak, request_signature, step_graph
from memplan.recompute.evaluate import Evaluation, Evaluator
from memplan.recompute.selection import Selection, to_part
from memplan.types.deadline import Deadline
from memplan.types.device import DeviceProfile
from memplan.types.plan import Fingerprint, OrderPart, Plan, RecomputePart, RegionsPart
from memplan.types.solution import Solution, Solved, TimedOut
from memplan.types.step_graph import StepGraph
from memplan.types.trace import Trace
from memplan.worker.captures import Captured, CaptureProgram

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
    part: RecomputePart
    """With the promise of `captured`."""
    evaluator: Evaluator
    """Of the graph that it was planned on."""
    evaluation: Evaluation
    captured: Captured
    verdict: Verdict
    outcome: Outcome

    def attempt(self) -> Attempt:
        estimate = self.verdict.estimate
        return Attempt(
            budget_bytes=self.part.budget_bytes,
            planned_bytes=self.evaluation.peak_bytes,
            requested_bytes=estimate.requested_peak_bytes,
            peak_bytes=estimate.peak_bytes,
            high_bytes=estimate.high_bytes,
            least_card_bytes=self.outcome.needed,
            alloc_conf=self.verdict.alloc_conf,
            fits=self.outcome.fits,
            added_fraction=self.evaluation.added_fraction,
        )


class Planner:
    """Looks for the plan with the least added time whose captured estimate fits the card.

    Each capture corrects the graph that the next plan is made on.

    Raises NoAnswerError for a trace without a backward pass.
    """

    def __init__(
        self,
        program: ScriptTarget,
        plain: Captured,
        verdict: Verdict,
        profile: DeviceProfile,
        capture: CaptureProgram,
        solver: Solver,
        order: OrderPart | None = None,
        regions: RegionsPart | None = None,
    ) -> None:
        """`order`, `regions`: in effect in `plain`, and in every plan."""
        self._program = program
        self._plain = plain
        self.order = order
        self._regions = regions
        self._card = Card(profile.total_memory_bytes, profile.context_high_bytes)
        self._capture = capture
        self._solver = solver
        self._profile = profile
        self.graph = step_graph(plain.trace, profile)
        """With the lifetimes that the captures with a plan have shown."""
        needed = least_card(plain.trace, profile, verdict)
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

        def part(peak_bytes: int) -> RecomputePart:
            return to_part(
                graph,
                selection,
                budget_bytes=budget,
                peak_bytes=peak_bytes,
                added_seconds=evaluation.added_seconds,
            )

        first = envelope(
            self._program,
            self._plain,
            self._profile,
            part=part(evaluation.peak_bytes),
            order=self.order,
            regions=self._regions,
        )
        captured = self._capture(self._program, first, quiet=True)
        verdict = judge(captured.trace, self._profile, captured.estimate)
        observed = step_graph(captured.trace, self._profile)
        self.graph = with_observed_lifetimes(graph, observed, selection.dropped)
        learnt = self.graph is not graph
        self._least = None if learnt else self._least
        self.planned.append(
            Planned(
                selection=selection,
                part=part(verdict.estimate.allocated_peak_bytes),
                evaluator=evaluator,
                evaluation=evaluation,
                captured=captured,
                verdict=verdict,
                outcome=Outcome(
                    budget=budget,
                    planned=plain_peak(observed) if learnt else evaluation.peak_bytes,
                    needed=least_card(captured.trace, self._profile, verdict),
                    fits=verdict.fits,
                    added_fraction=evaluation.added_fraction,
                    least=budget == 0 and not learnt,
                ),
            )
        )


def _best_of(solution: Solution[Selection]) -> Selection | None:
    if isinstance(solution, Solved):
        return solution.solution
    return solution.best if isinstance(solution, TimedOut) else None


def envelope(
    program: ScriptTarget,
    plain: Captured,
    profile: DeviceProfile,
    *,
    alloc_conf: str = "",
    part: RecomputePart | None = None,
    order: OrderPart | None = None,
    regions: RegionsPart | None = None,
    forward_ops: int = 0,
) -> Plan:
    """The plan as a file holds it, with what it was made from."""
    return Plan(
        memplan_version=__version__,
        made_from=Fingerprint(
            script=program.name,
            command=[program.name, *program.argv],
            torch_version=plain.estimate.torch_version,
            gpu=profile.name,
            forward_ops=forward_ops,
            requests=_requests(plain.trace),
        ),
        alloc_conf=alloc_conf,
        recompute=part,
        order=order,
        regions=regions,
    )


def _requests(trace: Trace) -> str:
    """Fingerprint of the steady step; of the last step where none is steady; else empty."""
    steps = find_steps(trace)
    if not len(steps):
        return ""
    start, stop = steps[len(steps) - 1 if steps.steady is None else steps.steady]
    return request_signature(trace, start, stop).hex()
