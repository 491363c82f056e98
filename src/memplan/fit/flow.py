"""`fit`: a program and a card to a plan with which it fits, or to the nearest change that fits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from memplan import __version__
from memplan.capture.options import ScriptTarget
from memplan.fit.answer import Change, Fit
from memplan.fit.child import Captured, CaptureProgram
from memplan.fit.levers import recompute_levers
from memplan.fit.nearest import nearest_changes
from memplan.fit.plans import Planned, Planner, Solver, envelope
from memplan.types.device import DeviceProfile
from memplan.types.errors import NoAnswerError, UsageError
from memplan.types.plan import Plan

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Fitted:
    """The answer, and the plan where there is one to keep."""

    answer: Fit
    plan: Plan | None


def fit(
    program: ScriptTarget,
    profile: DeviceProfile,
    capture: CaptureProgram,
    solver: Solver,
    progress: Progress = lambda text: None,
) -> Fitted:
    """Capture the program, and if its estimate's high bound does not fit the card, look for the
    plan with the least added time that makes it fit.

    A plan counts only when the program, captured again with the plan in effect, has an estimate
    that fits. `capture` has to estimate for `profile`. Raises CaptureFailedError when the program
    cannot be captured, UsageError when `capture` gave no verdict.
    """
    began = time.monotonic()
    plain = capture(program)
    if plain.estimate.fits is None:
        raise UsageError("there is no card to fit", "--gpu rtx4090, or a size such as --gpu 24GiB")
    if plain.estimate.fits:
        answer = _answer(plain, None, None, seconds=time.monotonic() - began)
        return Fitted(answer, envelope(program, plain, profile))
    notes: list[str] = []
    planner: Planner | None = None
    try:
        planner = Planner(program, plain, profile, capture, solver)
    except NoAnswerError as error:
        notes.append(f"Nothing can be recomputed: {error.message}.")
    chosen = _search(planner, progress) if planner is not None else None
    if planner is not None and chosen is not None:
        plan = envelope(
            program, plain, profile, part=chosen.part, forward_ops=planner.graph.forward_ops
        )
        return Fitted(_answer(plain, planner, chosen, seconds=time.monotonic() - began), plan)
    lowest = planner.lowest() if planner is not None else None
    changes, tried = nearest_changes(program, plain, lowest, profile, capture, progress)
    seconds = time.monotonic() - began
    answer = _answer(
        plain, planner, lowest, changes=changes, tried=tried, notes=notes, seconds=seconds
    )
    return Fitted(answer, None)


def _search(planner: Planner, progress: Progress) -> Planned | None:
    """The plan to use; None when none fits, the one of the least peak among them."""
    progress("looking for a plan")
    if not planner.graph.values.droppable.any():
        return None
    return planner.search()


def _answer(
    plain: Captured,
    planner: Planner | None,
    planned: Planned | None,
    *,
    changes: list[Change] | None = None,
    tried: list[str] | None = None,
    notes: list[str] | None = None,
    seconds: float,
) -> Fit:
    estimate = plain.estimate
    assert estimate.gpu is not None
    evaluation = planned.evaluation if planned else None
    return Fit(
        memplan_version=__version__,
        torch_version=estimate.torch_version,
        gpu=estimate.gpu,
        fits=bool(estimate.fits) or (planned is not None and planned.outcome.fits),
        before=estimate,
        after=planned.captured.estimate if planned else None,
        step_seconds=planner.evaluator.plain_seconds if planner else None,
        added_seconds=evaluation.added_seconds if evaluation else 0.0,
        added_fraction=evaluation.added_fraction if evaluation else 0.0,
        levers=(
            recompute_levers(planner.evaluator, planned.selection, planned.part)
            if planner and planned
            else []
        ),
        changes=changes or [],
        tried=tried or [],
        attempts=[p.attempt() for p in planner.planned] if planner else [],
        plan=None,
        seconds=seconds,
        notes=notes or [],
    )
