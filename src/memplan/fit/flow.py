"""`fit`: a program and a card to a plan with which it fits, or to the nearest change that fits.

Levers are tried one after the other, each on the best plan so far, until what is added is little.
Every plan that is captured on the way is counted, and the answer is chosen from all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from memplan.capturing.options import ScriptTarget
from memplan.fit.addresses import with_planned_addresses
from memplan.fit.answer import Change, Fit
from memplan.fit.choice import NO_LIMITS, Limits, answer_of
from memplan.fit.further_levers import FURTHER_LEVERS, FurtherLever
from memplan.fit.host_state import cheaper_share, with_less_state, with_state_on_host
from memplan.fit.nearest import nearest_changes
from memplan.fit.offload import OffloadPlanner
from memplan.fit.optimizer_in_backward import with_optimizer_in_backward
from memplan.fit.plans import Planner, Solver
from memplan.fit.regions import RegionSearch
from memplan.fit.search import Progress, Search
from memplan.fit.state import Job, MoreNodes, State, first_state
from memplan.fit.updates import with_smaller_updates
from memplan.phases import step_graph
from memplan.phases.optimizer_in_backward import is_compiled
from memplan.phases.passes import differentiated_bytes, passes_overlap, reads_twice
from memplan.report.text import format_bytes
from memplan.types.device import DeviceProfile
from memplan.types.errors import NoAnswerError, UsageError
from memplan.types.plan import Plan
from memplan.types.trace import Trace
from memplan.worker.captures import CaptureProgram
from memplan.worker.failure import CaptureFailedError

_USUAL_CAPTURES = 3
"""The usual number of captures for a lever with recomputation on top."""
_WORTH = 0.01
"""Time that a plan adds, as a fraction of the step, up to which no other way is looked for."""
_GAIN = 0.05
"""Time, as a fraction of the step, for which a plan in hand is tried in another way."""
_ROW = 4
"""Budgets that a frontier is captured for, beside the least peak, for each set of levers."""


_PIPELINED = (
    "Nothing can be recomputed or sent to the host: forward passes of other batches come before a "
    "batch's backward, as in a pipeline's schedule, and they do not all run the same operators, or "
    "a backward comes in parts. "
    "torch.utils.checkpoint around each layer, written into the script, would do it, and smaller "
    "micro-batches need less."
)

_RETAINED = (
    "Nothing can be recomputed or sent to the host: a backward pass goes through a graph that an "
    "earlier one has gone through (retain_graph=True), and needs what that one kept. One backward "
    "of the sum of the losses gives the same gradients up to rounding, and recomputation can then "
    "help."
)


@dataclass(frozen=True)
class Fitted:
    """The answer, its plan where there is one to keep, and those of the answer's frontier."""

    answer: Fit
    plan: Plan | None
    frontier: Sequence[Plan] = ()


@dataclass(frozen=True)
class _Route:
    """What one set of levers came to."""

    base: State
    """The state before autograd's saved values are recomputed."""
    end: State
    """The cheapest that fits; where none does, the one that fits the smallest card."""
    planner: Planner | None = None


def fit(
    program: ScriptTarget,
    profile: DeviceProfile,
    capture: CaptureProgram,
    solver: Solver,
    progress: Progress = lambda text: None,
    limits: Limits = NO_LIMITS,
    ahead: CaptureProgram | None = None,
    ranks: int = 1,
    more_nodes: Callable[[int], MoreNodes | None] = lambda times: None,
) -> Fitted:
    """Capture the program, and if its estimate's high bound does not fit the card, look for the
    plan with the least added time that makes it fit.

    A plan counts only when the program, captured again with the plan in effect, has an estimate
    that fits. `capture` has to estimate for `profile`; `ahead`, `ranks`,
    `more_nodes`: as in `Job`. Ctrl-C, once the
    program has been captured, ends the search with the best plan until then. Raises
    CaptureFailedError when the program cannot be captured, UsageError when `capture` gave no
    verdict.
    """
    began = time.monotonic()
    search = Search(progress)
    search.say(f"capturing {program.name}", 1)
    plain = capture(program)
    search.captured()
    if plain.estimate.fits is None:
        raise UsageError("there is no card to fit", "--gpu h100, or a size such as --gpu 24GiB")
    job = Job(program, profile, capture, search, ahead, limits.host_bytes, ranks, more_nodes)
    first = first_state(job, plain).found()
    finder = _Finder(first, solver, limits)
    changes: list[Change] = []
    tried: list[str] = []
    complete = True
    try:
        if not first.fits or limits.frontier:
            finder.run()
        finder.place()
        if not any(one.fits for one in search.found):
            best = finder.best()
            changes, tried = nearest_changes(first, best.base, best.end)
            finder.notes += _not_allowed(limits)
    except KeyboardInterrupt:
        complete = False
        progress("ending early, with what is known; Ctrl-C once more ends it at once")
    answer, chosen, curve = answer_of(first, limits, finder.plain_seconds)
    answer = msgspec.structs.replace(
        answer,
        complete=complete,
        changes=changes,
        tried=tried,
        seconds=time.monotonic() - began,
        notes=[*answer.notes, *finder.notes],
    )
    return Fitted(answer, chosen.plan if answer.fits else None, [one.plan for one in curve])


class _Finder:
    """Tries levers on a job that does not fit, or on any for its frontier."""

    def __init__(self, first: State, solver: Solver, limits: Limits) -> None:
        self._first, self._solver, self._limits = first, solver, limits
        self._search = first.job.search
        self._levers = [one for one in FURTHER_LEVERS if limits.allows(one.numbers)]
        self.plain_seconds = _step_seconds(first)
        """Seconds of the plain step; None where it has no backward pass."""
        self.notes: list[str] = []
        """About levers that the job cannot have."""
        self._routes: list[_Route] = []

    def run(self) -> None:
        self._search.say("looking for a plan", 1 + _USUAL_CAPTURES)
        self._search.tried += ["allocator"] * (not self._first.captured.estimate.alloc_conf)
        self._search.tried.append("order")
        base = self._with(with_optimizer_in_backward, self._first)
        base = self._with(with_smaller_updates, base)
        hopeless = _is_hopeless(base)
        early = [one for one in self._levers if not self._limits.frontier and one.first(base)]
        if hopeless or early:
            self._routes.append(_Route(base, base))
        for lever in early:
            if not self._is_good(_WORTH):
                self._try(lever)
        # What recomputation does not make fit with these levers, it does not without them.
        in_vain = len(self._routes) > 1 and not self.best().end.fits
        good = bool(self._routes) and self._is_good(_WORTH)
        if not hopeless and (self._limits.frontier or not (in_vain or good)):
            self._routes.append(self._first_route(base))
            if self._limits.frontier or not self._is_good(_WORTH):
                self._offload(self._routes[-1])
        for lever in self._levers:
            if lever in early:
                continue
            if self._limits.frontier or self._may_beat(lever, self.best().end):
                self._try(lever)
        if hopeless and len(self._routes) == 1:
            self._routes.append(self._first_route(base))
        if not self.best().end.fits:
            self._offload(self.best())
        else:
            self._balance()
            self._without_state()
        if self._limits.frontier:
            self._capture_rows()

    def place(self) -> None:
        """Addresses for the best plan, where it fits only as the allocator gives memory back in
        each step; for a cheaper one that does not fit for gaps. (`_placed` tries them where none
        fits.)"""
        best = self.best() if self._routes else _Route(self._first, self._first)
        if not best.end.fits:
            return
        planned = [one.state for one in best.planner.planned] if best.planner else []
        most = best.end.added_seconds - self._gain
        cheaper = [one for one in planned if not one.fits and one.added_seconds < most]
        near = min(cheaper, key=lambda one: one.needed, default=None)
        if near is None or not self._with(with_planned_addresses, near).fits:
            self._with(with_planned_addresses, best.end)

    def best(self, without: str = "") -> _Route:
        """The cheapest that fits; where none does, the one that fits the smallest card. Of those
        `without` a part of the plan, where it is named."""
        routes = [one for one in self._routes if not getattr(one.base.plan, without, None)]
        fitting = [route for route in routes if route.end.fits]
        if fitting:
            return min(fitting, key=lambda route: route.end.added_seconds)
        return min(routes, key=lambda route: route.end.needed)

    def _first_route(self, base: State) -> _Route:
        self._search.say("looking for a plan", _USUAL_CAPTURES, once_begun=True)
        if base is not self._first:
            try:
                return self._route(base)
            except CaptureFailedError as error:
                self._routes.append(_Route(base, base))
                self.notes.append(
                    f"With the optimizer's updates changed and recomputation, {_failure(error)}"
                )
        try:
            return self._route(self._first)
        except CaptureFailedError as error:
            self.notes.append(f"With recomputation, {_failure(error)}")
            return _Route(self._first, self._first)

    def _try(self, lever: FurtherLever) -> None:
        self._search.say(f"trying {lever.words}", 1 + _USUAL_CAPTURES, once_begun=True)
        base, captures = self.best(lever.instead_of).base, self._search.captures
        changed = self._with(lever.apply, base)
        if self._search.captures > captures:
            self._search.tried.append(lever.kind)
        if changed is base:
            return
        fits = self._add_route(lever, changed)
        other, end = lever.otherwise(base, changed, fits), self.best().end
        if other is not None and (
            not end.fits or other.added_seconds < end.added_seconds - self._gain
        ):
            self._add_route(lever, other.found())

    def _add_route(self, lever: FurtherLever, base: State) -> bool:
        """Whether the job fits with it, and with recomputation on top."""
        try:
            self._routes.append(self._route(base))
        except CaptureFailedError as error:
            self.notes.append(f"With {lever.words} and recomputation, {_failure(error)}")
            return False
        return self._routes[-1].end.fits

    def _balance(self) -> None:
        """Another share of the optimizer's state on the host, with more or less recomputation."""
        [lever] = [one for one in FURTHER_LEVERS if one.kind == "state"]
        best, plain = self.best(), self.best("state")
        known = best if best.planner is not None else plain
        added = best.end.added_seconds
        if not best.end.fits or added <= self._gain:
            return
        if is_compiled(best.end.captured.trace):  # nobody plans what else would be recomputed
            less = self._with(with_less_state, best.end) if best.end.plan.state else best.end
            if less is not best.end:
                self._routes.append(_Route(best.base, self._placed(less)))
            return
        if known.planner is None:
            return
        share = cheaper_share(plain.base, known.base, known.planner, added, self._gain)
        if share is not None:
            again = partial(with_state_on_host, share=share)
            self._try(lever._replace(apply=again, instead_of="state"))

    def _without_state(self) -> None:
        """Try levers that came on top of state on the host in its place, where it costs much."""
        for lever in reversed(self._levers):
            part = self.best().base.plan.state
            if part is None or part.added_seconds <= self._gain:
                return
            instead = lever._replace(instead_of="state")
            if lever.numbers == "rounding" and self._may_beat(instead, self.best().end):
                self._try(instead)

    def _offload(self, route: _Route) -> None:
        """Try to offload values where that is cheaper than to recompute them as this route does."""
        planner = route.planner
        if planner is None or not planner.offloads or route.end.plan.offload is not None:
            return
        self._search.say("trying activations on the host", _USUAL_CAPTURES)
        self._search.tried.append("offload")
        try:
            end = OffloadPlanner(route.base, planner.graphs[0]).search(planner.best())
        except CaptureFailedError as error:
            self.notes.append(f"With activations on the host, {_failure(error)}")
            return
        if end is not None:
            best = self.best().end
            if not best.fits or end.added_seconds < best.added_seconds:
                end = self._placed(end)
            self._routes.append(_Route(route.base, end, planner))

    def _placed(self, end: State) -> State:
        """Plan addresses where fragmentation is what does not fit: that adds no time."""
        return end if end.fits else self._with(with_planned_addresses, end)

    def _with(self, lever: Callable[[State], State], base: State) -> State:
        changed = lever(base)
        if changed.plan == base.plan:
            new = changed.notes[len(base.notes) :]
            self.notes += [note for note in new if note not in self.notes]
            return base
        return changed.found()

    def _route(self, base: State) -> _Route:
        """Recomputation, inside compiled graphs first, where `base` does not fit."""
        if base.fits:
            return _Route(base, base)
        base = RegionSearch(base).run()
        if base.fits:
            return _Route(base, base)
        placed = self._placed(base)
        if placed.fits:
            return _Route(base, placed)
        try:
            planner = Planner(base, self._solver)
        except NoAnswerError as error:
            self.notes.append(f"Nothing can be recomputed: {error.message}.")
            return _Route(base, base)
        tried = {one.kind for one in base.levers}
        left = [one for one in self._levers if one.kind not in tried]

        def ahead(added: float) -> list[Callable[[State], State]]:
            return [one.apply for one in left if one.least(base) < added]

        droppable = any(graph.values.droppable.any() for graph in planner.graphs)
        chosen = (planner.search(ahead) or planner.lowest()) if droppable else None
        if chosen is None or not chosen.state.fits:
            said = _why_kept(base.captured.trace, droppable)
            self.notes += [said] if said and said not in self.notes else []
        return _Route(base, self._placed(chosen.state) if chosen else base, planner)

    def _capture_rows(self) -> None:
        """Plans of many budgets, for each set of levers."""
        routes = {id(route.planner or route): route for route in self._routes}
        for route in routes.values():
            self._search.say("capturing the frontier", len(routes) * _ROW)
            try:
                planner = route.planner or Planner(route.base, self._solver)
                planner.row(_ROW)
            except (NoAnswerError, CaptureFailedError) as error:
                self.notes.append(f"The frontier has fewer points: {error}.")

    def _may_beat(self, lever: FurtherLever, end: State) -> bool:
        """Whether a lever on the best plan's base may be cheaper than that plan."""
        if not end.fits:
            return True
        base = self.best(lever.instead_of).base
        least = base.added_seconds + lever.least(base)
        return not self._is_good(lever.beyond) and least < end.added_seconds

    @property
    def _gain(self) -> float:
        return _GAIN * (self.plain_seconds or 0.0)

    def _is_good(self, worth: float) -> bool:
        """Whether the best plan adds so little time that another way could hardly be cheaper."""
        end = self.best().end
        return end.fits and end.added_seconds <= min(worth, self._limits.most) * (
            self.plain_seconds or 0.0
        )


def _failure(error: CaptureFailedError) -> str:
    reason = error.outcome.reason.removesuffix(".")
    return f"the script fails: {reason}."


def _why_kept(trace: Trace, droppable: bool) -> str:
    """What keeps values on the card that no plan drops; empty where it is nothing known."""
    if nbytes := differentiated_bytes(trace):
        return (
            f"{format_bytes(nbytes)} that autograd keeps for gradients that are differentiated "
            "themselves (create_graph=True) are neither recomputed nor sent to the host."
        )
    if droppable or not passes_overlap(trace):
        return ""
    return _RETAINED if reads_twice(trace) else _PIPELINED


def _not_allowed(limits: Limits) -> list[str]:
    """What else there is, where nothing fits."""
    levers = [one for one in FURTHER_LEVERS if not limits.allows(one.numbers)]
    named = ", ".join(f"{one.words} (--allow {one.numbers})" for one in levers)
    return [f"Levers that change numbers were not tried: {named}."] if levers else []


def _is_hopeless(state: State) -> bool:
    """Whether what lives from step to step is by itself more than the card."""
    try:
        graph = step_graph(state.captured.trace, state.job.profile)
    except NoAnswerError:
        return False
    profile, values = state.job.profile, graph.values
    in_flight = graph.others * int(values.bytes[values.droppable].sum())
    lasting = graph.base_bytes - in_flight
    return lasting + profile.context_high_bytes > profile.total_memory_bytes


def _step_seconds(state: State) -> float | None:
    try:
        return state.step_seconds()
    except NoAnswerError:
        return None
