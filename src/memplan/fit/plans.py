"""Plans for one captured job, each captured again with the plan in effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from memplan import __version__
from memplan.capture.options import ScriptTarget
from memplan.fit.answer import Attempt
from memplan.fit.budgets import Outcome, first_budget, next_budget, outcome
from memplan.fit.child import Captured, CaptureProgram
from memplan.phases import find_steps, request_signature
from memplan.phases.step_graph import step_graph
from memplan.recompute.evaluate import Evaluation, Evaluator
from memplan.recompute.selection import Selection, to_part
from memplan.types.device import DeviceProfile
from memplan.types.plan import Fingerprint, Plan, RecomputePart
from memplan.types.solution import Solution, Solved, TimedOut
from memplan.types.step_graph import StepGraph
from memplan.types.trace import Trace

_MOST_ATTEMPTS = 6
_SOLVE_SECONDS = 6.0


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
    evaluation: Evaluation
    captured: Captured
    outcome: Outcome

    def attempt(self) -> Attempt:
        estimate = self.captured.estimate
        return Attempt(
            budget_bytes=self.part.budget_bytes,
            planned_bytes=self.outcome.planned,
            requested_bytes=self.outcome.requested,
            peak_bytes=estimate.peak_bytes,
            high_bytes=estimate.high_bytes,
            fits=self.outcome.fits,
            added_fraction=self.evaluation.added_fraction,
        )


class Planner:
    """Looks for the plan with the least added time whose captured estimate fits the card.

    Raises NoAnswerError for a trace without a backward pass.
    """

    def __init__(
        self,
        program: ScriptTarget,
        plain: Captured,
        profile: DeviceProfile,
        capture: CaptureProgram,
        solver: Solver,
    ) -> None:
        self._program = program
        self._plain = plain
        self._capture = capture
        self._solver = solver
        self._gpu = profile.name
        self.graph = step_graph(plain.trace, profile)
        self.evaluator = Evaluator(self.graph)
        self.planned: list[Planned] = []
        """Every plan that was captured, in order."""
        self._least: Selection | None = None

    def search(self) -> Planned | None:
        """The cheapest plan that fits; None when not even the one of the least peak does."""
        budget: int | None = first_budget(self._plain.estimate)
        while budget is not None and len(self.planned) < _MOST_ATTEMPTS:
            found = self._selection(budget)
            if any(found[0] == done.selection for done in self.planned):
                break
            self._try(*found)
            budget = next_budget([planned.outcome for planned in self.planned])
        return self.best()

    def best(self) -> Planned | None:
        """Of the plans captured so far that fit, the one that adds the least time."""
        fitting = [p for p in self.planned if p.outcome.fits]
        return min(fitting, key=lambda p: p.evaluation.added_seconds, default=None)

    def lowest(self) -> Planned | None:
        """Of the plans captured so far, the one with the least high bound."""
        return min(self.planned, key=lambda p: p.outcome.high, default=None)

    def _selection(self, budget: int) -> tuple[Selection, int]:
        """What to drop, and the budget that this keeps to: 0 where there is none for `budget`."""
        if budget > 0:
            solution = self._solver.solve(self.graph, budget, deadline_seconds=_SOLVE_SECONDS)
            selection = _best_of(solution)
            if selection is not None:
                return selection, budget
        if self._least is None:
            solution = self._solver.least_peak(self.graph, deadline_seconds=_SOLVE_SECONDS)
            self._least = _best_of(solution) or Selection()
        return self._least, 0

    def _try(self, selection: Selection, budget: int) -> None:
        evaluation = self.evaluator.evaluate(selection)

        def part(peak_bytes: int) -> RecomputePart:
            return to_part(
                self.graph,
                selection,
                budget_bytes=budget,
                peak_bytes=peak_bytes,
                added_seconds=evaluation.added_seconds,
            )

        first = Plan(memplan_version=__version__, recompute=part(evaluation.peak_bytes))
        captured = self._capture(self._program, first, quiet=True)
        self.planned.append(
            Planned(
                selection=selection,
                part=part(captured.estimate.allocated_peak_bytes),
                evaluation=evaluation,
                captured=captured,
                outcome=outcome(
                    captured.estimate,
                    planned=evaluation.peak_bytes,
                    added_fraction=evaluation.added_fraction,
                    least=budget == 0,
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
    part: RecomputePart | None = None,
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
        recompute=part,
    )


def _requests(trace: Trace) -> str:
    """Fingerprint of the steady step; of the last step where none is steady; else empty."""
    steps = find_steps(trace)
    if not len(steps):
        return ""
    start, stop = steps[len(steps) - 1 if steps.steady is None else steps.steady]
    return request_signature(trace, start, stop).hex()
