"""`fit`: a program and a card to a plan with which it fits, or to the nearest change that fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memplan import __version__
from memplan.capturing.options import ScriptTarget
from memplan.fit.answer import Change, Fit, Lever
from memplan.fit.judge import Verdict, judge, least_card
from memplan.fit.levers import recompute_levers
from memplan.fit.nearest import nearest_changes
from memplan.fit.optimizer_in_backward import InBackward, find_in_backward, promised
from memplan.fit.plans import Planned, Planner, Solver, envelope
from memplan.fit.regions import Regions, RegionSearch
from memplan.fit.regions import promised as promised_inside
from memplan.types.device import DeviceProfile
from memplan.types.errors import NoAnswerError, UsageError
from memplan.types.plan import Plan
from memplan.worker.captures import Captured, CaptureProgram
from memplan.worker.failure import CaptureFailedError

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
        answer = _answer(plain, _Found(plain, verdict), seconds=time.monotonic() - began)
        return Fitted(answer, plan)
    progress("looking for a plan")
    in_backward, said = find_in_backward(program, plain, verdict, profile, capture)
    search = _Search(program, plain, verdict, profile, capture, solver)
    try:
        found = search.run(in_backward)
    except CaptureFailedError:
        if in_backward is None:
            raise
        said = "Weights are not updated in the backward pass: recomputation fails with it."
        found = search.run(None)
    notes = [note for note in (found.note, said) if note]
    if found.verdict.fits:
        answer = _answer(plain, found, notes=notes, seconds=time.monotonic() - began)
        return Fitted(answer, found.plan(program, plain, profile))
    lowest, order = found.chosen, found.in_backward.part if found.in_backward else None
    regions = found.regions.part if found.regions else None
    reference = found.base
    changes, tried = nearest_changes(
        program, reference, lowest, profile, capture, progress, order, regions
    )
    answer = _answer(
        plain,
        found,
        least_card_bytes=(
            lowest.outcome.needed if lowest else least_card(reference.trace, profile, found.verdict)
        ),
        changes=changes,
        tried=tried,
        notes=notes,
        seconds=time.monotonic() - began,
    )
    return Fitted(answer, None)


@dataclass(frozen=True)
class _Found:
    """What was found of updates in backward and recomputation together."""

    base: Captured
    """The job without recomputation."""
    verdict: Verdict
    """With what is in effect."""
    in_backward: InBackward | None = None
    regions: Regions | None = None
    chosen: Planned | None = None
    """The plan that is kept; where none fits, the one of the least peak."""
    planner: Planner | None = None
    tried: Sequence[Regions] = ()
    note: str = ""

    @property
    def added_seconds(self) -> float:
        inside = self.regions.part.added_seconds if self.regions else 0.0
        return inside + (self.chosen.evaluation.added_seconds if self.chosen else 0.0)

    @property
    def plain_seconds(self) -> float | None:
        """Of forward and backward, without recomputation."""
        if self.regions:
            return self.regions.plain_seconds
        return self.chosen.evaluation.plain_seconds if self.chosen else None

    def plan(self, program: ScriptTarget, plain: Captured, profile: DeviceProfile) -> Plan:
        forward_ops = self.planner.graph.forward_ops if self.planner and self.chosen else 0
        return envelope(
            program,
            plain,
            profile,
            alloc_conf=self.verdict.alloc_conf,
            part=self.chosen.part if self.chosen else None,
            order=promised(self.in_backward.part, self.verdict) if self.in_backward else None,
            regions=promised_inside(self.regions.part, self.verdict) if self.regions else None,
            forward_ops=forward_ops,
        )


@dataclass(frozen=True)
class _Search:
    program: ScriptTarget
    plain: Captured
    verdict: Verdict
    profile: DeviceProfile
    capture: CaptureProgram
    solver: Solver

    def run(self, in_backward: InBackward | None) -> _Found:
        """Updates in backward, if there are any, and recomputation where they are not enough."""
        base = in_backward.captured if in_backward else self.plain
        verdict = in_backward.verdict if in_backward else self.verdict
        if verdict.fits:
            return _Found(base, verdict, in_backward)
        order = in_backward.part if in_backward else None
        search = RegionSearch(self.program, base, verdict, self.profile, self.capture, order)
        inside = search.run()
        if inside is not None:
            base, verdict = inside.captured, inside.verdict
        found = _Found(base, verdict, in_backward, inside, tried=search.tried)
        if verdict.fits:
            return found
        regions = inside.part if inside else None
        try:
            planner = Planner(
                self.program, base, verdict, self.profile, self.capture, self.solver, order, regions
            )
        except NoAnswerError as error:
            note = f"Nothing can be recomputed: {error.message}."
            return replace(found, note=note)
        chosen = planner.search() if planner.graph.values.droppable.any() else None
        chosen = chosen or planner.lowest()
        verdict = chosen.verdict if chosen else verdict
        return replace(found, verdict=verdict, chosen=chosen, planner=planner)


def _answer(
    plain: Captured,
    found: _Found,
    *,
    least_card_bytes: int | None = None,
    changes: list[Change] | None = None,
    tried: list[str] | None = None,
    notes: list[str] | None = None,
    seconds: float,
) -> Fit:
    estimate, verdict = plain.estimate, found.verdict
    assert estimate.gpu is not None
    plain_seconds, added = found.plain_seconds, found.added_seconds
    planned = found.planner.planned if found.planner else []
    attempts = [*(one.attempt() for one in found.tried), *(one.attempt() for one in planned)]
    with_plan = found.chosen or found.in_backward or found.regions or verdict.alloc_conf
    return Fit(
        memplan_version=__version__,
        torch_version=estimate.torch_version,
        gpu=estimate.gpu,
        fits=verdict.fits,
        before=estimate,
        after=verdict.estimate if with_plan else None,
        least_card_bytes=least_card_bytes,
        step_seconds=plain_seconds,
        added_seconds=added,
        added_fraction=added / plain_seconds if plain_seconds else 0.0,
        levers=_levers(found),
        changes=changes or [],
        tried=tried or [],
        attempts=attempts,
        plan=None,
        seconds=seconds,
        notes=notes or [],
    )


def _levers(found: _Found) -> list[Lever]:
    levers = []
    verdict, chosen = found.verdict, found.chosen
    if verdict.alloc_conf and (verdict.saved_bytes or chosen is None):
        levers.append(
            Lever(kind="allocator", name=verdict.alloc_conf, saved_bytes=verdict.saved_bytes)
        )
    if found.in_backward is not None:
        levers.append(found.in_backward.lever())
    if found.regions is not None:
        levers.append(found.regions.lever())
    if chosen is not None:
        levers += recompute_levers(chosen.evaluator, chosen.selection, chosen.part)
    return levers
