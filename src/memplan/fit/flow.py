"""`fit`: a program and a card to a plan with which it fits, or to the nearest change that fits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from memplan import __version__
from memplan.capturing.options import ScriptTarget
from memplan.fit.answer import NUMBERS, Alternative, Attempt, Change, Fit, Lever, Numbers
from memplan.fit.host_state import with_state_on_host
from memplan.fit.judge import least_card
from memplan.fit.loss import with_loss_in_chunks
from memplan.fit.micro_batches import with_micro_batches
from memplan.fit.nearest import nearest_changes
from memplan.fit.optimizer_in_backward import with_optimizer_in_backward
from memplan.fit.plans import Planner, Solver
from memplan.fit.regions import RegionSearch
from memplan.fit.state import Job, Progress, State, first_state
from memplan.phases import step_graph
from memplan.types.device import DeviceProfile
from memplan.types.errors import NoAnswerError, UsageError
from memplan.types.plan import Plan
from memplan.worker.captures import CaptureProgram
from memplan.worker.failure import CaptureFailedError

_WORTH_SECONDS = 0.01
"""Added time, as a fraction of the step, below which no other way is looked for."""

_WORTH_LINK = 0.05
"""The same for moving optimizers' state over the link to the host."""
_WORTH_SMALLER_BATCHES = 0.1
"""The same for smaller batches, which seldom add less: an update's weights are read more often."""


@dataclass(frozen=True)
class Fitted:
    """The answer, and the plan where there is one to keep."""

    answer: Fit
    plan: Plan | None


@dataclass(frozen=True)
class _Route:
    """What one set of levers came to."""

    base: State
    """Without recomputation of what autograd saves."""
    end: State
    """The cheapest that fits; where none does, the one that fits the smallest card."""
    needed: int | None = None
    """Bytes of the least card that `end` fits, where that is known."""
    attempts: Sequence[Attempt] = ()


def fit(
    program: ScriptTarget,
    profile: DeviceProfile,
    capture: CaptureProgram,
    solver: Solver,
    progress: Progress = lambda text: None,
    allow: Numbers = "exact",
) -> Fitted:
    """Capture the program, and if its estimate's high bound does not fit the card, look for the
    plan with the least added time that makes it fit.

    A plan counts only when the program, captured again with the plan in effect, has an estimate
    that fits. `capture` has to estimate for `profile`. `allow`: what levers may do to the job's
    numbers. Raises CaptureFailedError when the program cannot be captured, UsageError when
    `capture` gave no verdict.
    """
    began = time.monotonic()
    progress(f"capturing {program.name}")
    plain = capture(program)
    if plain.estimate.fits is None:
        raise UsageError("there is no card to fit", "--gpu h100, or a size such as --gpu 24GiB")
    first = first_state(Job(program, profile, capture, progress), plain)
    if first.fits:
        answer = _answer(first, _Route(first, first), seconds=time.monotonic() - began)
        return Fitted(answer, first.promised())
    progress("looking for a plan")
    plain_seconds = _step_seconds(first)
    routes = _exact_routes(first, solver, plain_seconds)
    exact = _best(routes)
    if _allows(allow, "rounding") and not _good(exact, plain_seconds, _WORTH_SECONDS):
        progress("looking for a plan with other rounding")
        routes += _routes_with_rounding(exact, solver, plain_seconds)
    chosen = _best(routes)
    changes: list[Change] = []
    tried: list[str] = []
    if not chosen.end.fits:
        changes, tried = nearest_changes(chosen.base, chosen.end)
    answer = _answer(
        first,
        chosen,
        exact=None if chosen is exact else exact,
        changes=changes,
        tried=tried,
        seconds=time.monotonic() - began,
    )
    answer = msgspec.structs.replace(answer, attempts=[a for r in routes for a in r.attempts])
    return Fitted(answer, chosen.end.promised() if chosen.end.fits else None)


def _best(routes: Sequence[_Route]) -> _Route:
    """The cheapest that fits; where none does, the one that fits the smallest card."""
    fitting = [route for route in routes if route.end.fits]
    if fitting:
        return min(fitting, key=lambda route: route.end.added_seconds)
    return min(routes, key=_needed)


def _exact_routes(first: State, solver: Solver, plain_seconds: float | None) -> list[_Route]:
    """Updates in backward and recomputation; then optimizers' state on the host as well."""
    base = with_optimizer_in_backward(first)
    routes = []
    if not _is_hopeless(base):
        try:
            routes.append(_route(base, solver))
        except CaptureFailedError:
            if base.plan.order is None:
                raise
            said = "Weights are not updated in the backward pass: recomputation fails with it."
            base = first.with_note(said)
            routes.append(_route(base, solver))
        if _good(routes[0], plain_seconds, _WORTH_LINK):
            return routes
    moved = with_state_on_host(base)
    if moved.plan.state is not None or not routes:
        routes.append(_route(moved, solver))
    return routes


def _is_hopeless(state: State) -> bool:
    """Whether what lives from step to step is by itself more than the card."""
    try:
        graph = step_graph(state.captured.trace, state.job.profile)
    except NoAnswerError:
        return False
    profile = state.job.profile
    return graph.base_bytes + profile.context_high_bytes > profile.total_memory_bytes


def _routes_with_rounding(
    exact: _Route, solver: Solver, plain_seconds: float | None
) -> list[_Route]:
    """The loss in chunks with recomputation, and with smaller batches instead; both where these are
    not enough."""
    chunked = with_loss_in_chunks(exact.base)
    routes = []
    if chunked is not exact.base:
        routes.append(_route(chunked, solver))
        if _good(routes[0], plain_seconds, _WORTH_SMALLER_BATCHES):
            return routes
    smaller = with_micro_batches(chunked)
    if smaller.plan.arguments is None:
        notes = smaller.notes[len(chunked.notes) :]
        return [replace(one, end=one.end.with_note(*notes)) for one in routes]
    return [*routes, _route(smaller, solver)]


def _route(base: State, solver: Solver) -> _Route:
    """Recomputation, inside compiled graphs first, where `base` does not fit."""
    if base.fits:
        return _Route(base, base)
    regions = RegionSearch(base)
    base = regions.run()
    attempts = [one.attempt() for one in regions.tried]
    if base.fits:
        return _Route(base, base, attempts=attempts)
    try:
        planner = Planner(base, solver)
    except NoAnswerError as error:
        base = base.with_note(f"Nothing can be recomputed: {error.message}.")
        return _Route(base, base, attempts=attempts)
    chosen = planner.search() if planner.graph.values.droppable.any() else None
    chosen = chosen or planner.lowest()
    attempts += [one.attempt() for one in planner.planned]
    if chosen is None:
        return _Route(base, base, attempts=attempts)
    return _Route(base, chosen.state, chosen.outcome.needed, attempts)


def _needed(route: _Route) -> int:
    if route.needed is not None:
        return route.needed
    return least_card(route.end.captured.trace, route.end.job.profile, route.end.verdict)


def _allows(allow: Numbers, needs: Numbers) -> bool:
    return NUMBERS.index(allow) >= NUMBERS.index(needs)


def _good(route: _Route, plain_seconds: float | None, worth: float) -> bool:
    """Whether it fits and adds so little time that another way could hardly be cheaper."""
    return route.end.fits and route.end.added_seconds <= worth * (plain_seconds or 0.0)


def _step_seconds(state: State) -> float | None:
    try:
        return state.step_seconds()
    except NoAnswerError:
        return None


def _answer(
    first: State,
    route: _Route,
    *,
    exact: _Route | None = None,
    changes: Sequence[Change] = (),
    tried: Sequence[str] = (),
    seconds: float,
) -> Fit:
    plain, end = first.captured.estimate, route.end
    assert plain.gpu is not None
    changed = bool(end.levers or end.verdict.alloc_conf)
    plain_seconds = _step_seconds(first) if changed else None
    added = end.added_seconds
    return Fit(
        memplan_version=__version__,
        torch_version=plain.torch_version,
        gpu=plain.gpu,
        fits=end.fits,
        before=plain,
        after=end.verdict.estimate if changed else None,
        least_card_bytes=None if end.fits else _needed(route),
        step_seconds=plain_seconds,
        added_seconds=added,
        added_fraction=_fraction(added, plain_seconds),
        levers=_levers(end, plain_seconds),
        exact=_alternative(exact, plain_seconds) if exact else None,
        changes=list(changes),
        tried=list(tried),
        attempts=list(route.attempts),
        plan=None,
        seconds=seconds,
        notes=list(end.notes),
    )


def _alternative(route: _Route, plain_seconds: float | None) -> Alternative:
    end = route.end
    found = end.verdict.estimate
    return Alternative(
        fits=end.fits,
        peak_bytes=found.peak_bytes,
        low_bytes=found.low_bytes,
        high_bytes=found.high_bytes,
        least_card_bytes=None if end.fits else _needed(route),
        added_seconds=end.added_seconds,
        added_fraction=_fraction(end.added_seconds, plain_seconds),
        levers=_levers(end, plain_seconds),
    )


def _levers(end: State, plain_seconds: float | None) -> list[Lever]:
    verdict = end.verdict
    levers = [
        msgspec.structs.replace(lever, added_fraction=_fraction(lever.added_seconds, plain_seconds))
        for lever in end.levers
    ]
    if verdict.alloc_conf and (verdict.saved_bytes or end.plan.recompute is None):
        allocator = Lever(
            kind="allocator", name=verdict.alloc_conf, saved_bytes=verdict.saved_bytes
        )
        return [allocator, *levers]
    return levers


def _fraction(seconds: float, of: float | None) -> float:
    return seconds / of if of else 0.0
