"""Levers that lower what is alive while an optimizer steps, and cost no time: gradients that are
views of the buckets of DistributedDataParallel, and updates of a bucket of weights at a time.
"""

from __future__ import annotations

from typing import Literal

from memplan.fit.answer import Lever
from memplan.fit.judge import WORTH
from memplan.fit.state import State
from memplan.phases.optimizer_in_backward import has_buckets, peak_of_update
from memplan.types.plan import GradViewsPart, Part, StepPart
from memplan.worker.failure import CaptureFailedError

_FULL = 0.9
"""Share of the card that a step's tensors may take without these levers: gaps come on top."""


def with_smaller_updates(state: State) -> State:
    """The job with those of them that it can have, where its update would leave little room on the
    card, whatever is recomputed; else the job as it is, maybe with a sentence."""
    if _is_full(state) and has_buckets(state.captured.trace):
        name = "gradients in DDP's buckets"
        state = _tried(state, "grad_views", GradViewsPart(), name)
    whole, least = peak_of_update(state.captured.trace)
    if state.plan.order is None and _is_full(state) and least < (1 - WORTH) * whole:
        state = _tried(state, "step", StepPart(), "a bucket of weights at a time")
    return state


def _is_full(state: State) -> bool:
    profile = state.job.profile
    room = profile.total_memory_bytes - profile.context_high_bytes
    return peak_of_update(state.captured.trace)[0] > _FULL * room


def _tried(state: State, kind: Literal["grad_views", "step"], part: Part, name: str) -> State:
    """The job with a part of the plan, where that lowers the update's peak by 1 % or more."""
    try:
        after = state.trying(**{kind: part})
    except CaptureFailedError as error:
        return state.with_note(f"Not used, {name}: the script fails, {error.outcome.reason}")
    before = peak_of_update(state.captured.trace)[0]
    saved = before - peak_of_update(after.captured.trace)[0]
    if saved < WORTH * before:
        return state.with_note(after.captured.trace.meta.unmet.get(kind, ""))
    return after.with_lever(Lever(kind=kind, name=name, saved_bytes=saved, bound=""))
