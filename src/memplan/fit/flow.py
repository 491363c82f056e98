"""`fit`: a program and a card to a plan with which it fits, or to the nearest change that fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memplan import __version__
from memplan.capture.options import ScriptTarget
from memplan.fit.answer import Change, Fit, Lever
from memplan.fit.child import Captured, CaptureProgram
from memplan.fit.judge import Verdict, judge, least_card
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
    progress(f"capturing {program.name}")
    plain = capture(program)
    if plain.estimate.fits is None:
        raise UsageError("there is no card to fit", "--gpu h100, or a size such as --gpu 24GiB")
    verdict = judge(plain.trace, profile, plain.estimate)
    if verdict.fits:
        plan = envelope(program, plain, profile, alloc_conf=verdict.alloc_conf)
        return Fitted(_answer(plain, verdict, None, seconds=time.monotonic() - began), plan)
    notes: list[str] = []
    planner: Planner | None = None
    try:
        planner = Planner(program, plain, verdict, profile, capture, solver)
    except NoAnswerError as error:
        notes.append(f"Nothing can be recomputed: {error.message}.")
    planned = planner.planned if planner is not None else []
    chosen = _search(planner, progress) if planner is not None else None
    if planner is not None and chosen is not None:
        plan = envelope(
            program,
            plain,
            profile,
            alloc_conf=chosen.verdict.alloc_conf,
            part=chosen.part,
            forward_ops=planner.graph.forward_ops,
        )
        seconds = time.monotonic() - began
        answer = _answer(plain, chosen.verdict, chosen, planned=planned, seconds=seconds)
        return Fitted(answer, plan)
    lowest = planner.lowest() if planner is not None else None
    changes, tried = nearest_changes(program, plain, lowest, profile, capture, progress)
    verdict = lowest.verdict if lowest else verdict
    least = lowest.outcome.needed if lowest else least_card(plain.trace, profile, verdict)
    answer = _answer(
        plain,
        verdict,
        lowest,
        least_card_bytes=least,
        planned=planned,
        changes=changes,
        tried=tried,
        notes=notes,
        seconds=time.monotonic() - began,
    )
    return Fitted(answer, None)


def _search(planner: Planner, progress: Progress) -> Planned | None:
    """The cheapest plan that fits, the one of the least peak among them; None when none does."""
    progress("looking for a plan")
    if not planner.graph.values.droppable.any():
        return None
    return planner.search()


def _answer(
    plain: Captured,
    verdict: Verdict,
    chosen: Planned | None,
    *,
    least_card_bytes: int | None = None,
    planned: Sequence[Planned] = (),
    changes: list[Change] | None = None,
    tried: list[str] | None = None,
    notes: list[str] | None = None,
    seconds: float,
) -> Fit:
    """`verdict`: with what was chosen in effect."""
    estimate = plain.estimate
    assert estimate.gpu is not None
    evaluation = chosen.evaluation if chosen else None
    return Fit(
        memplan_version=__version__,
        torch_version=estimate.torch_version,
        gpu=estimate.gpu,
        fits=verdict.fits,
        before=estimate,
        after=verdict.estimate if chosen or verdict.alloc_conf else None,
        least_card_bytes=least_card_bytes,
        step_seconds=evaluation.plain_seconds if evaluation else None,
        added_seconds=evaluation.added_seconds if evaluation else 0.0,
        added_fraction=evaluation.added_fraction if evaluation else 0.0,
        levers=_levers(verdict, chosen),
        changes=changes or [],
        tried=tried or [],
        attempts=[p.attempt() for p in planned],
        plan=None,
        seconds=seconds,
        notes=notes or [],
    )


def _levers(verdict: Verdict, chosen: Planned | None) -> list[Lever]:
    levers = []
    if verdict.alloc_conf and (verdict.saved_bytes or chosen is None):
        levers.append(
            Lever(kind="allocator", name=verdict.alloc_conf, saved_bytes=verdict.saved_bytes)
        )
    if chosen is not None:
        levers += recompute_levers(chosen.evaluator, chosen.selection, chosen.part)
    return levers
