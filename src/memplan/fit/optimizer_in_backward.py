"""The lever that costs no time: weights updated in the backward pass."""

from __future__ import annotations

import msgspec

from memplan.fit.answer import Lever
from memplan.fit.judge import judge, lowers
from memplan.fit.state import State
from memplan.phases.optimizer_in_backward import with_updates_in_backward
from memplan.types.plan import OrderPart

NAME = "updates in backward"


def with_optimizer_in_backward(state: State) -> State:
    """The job with that; where it would change a number or gain little, the job as it is, with a
    sentence unless the capture has said why.

    What the trace says it would do is simulated first. Only where that is worth it is the job
    captured again with it in effect, and then that capture counts.
    """
    if reason := state.in_backward.reason:
        return state.with_note(f"Weights are not updated in the backward pass: {reason}.")
    part = possible_part(state)
    expected = judge(with_updates_in_backward(state.captured.trace), state.job.profile)
    if part is None or not lowers(state.verdict, expected):
        return state
    # Something may use a gradient in the first step only.
    watched = [] if part.clips else [{"order": msgspec.structs.replace(part, from_first=False)}]
    after = state.with_tried(
        _lever,
        {"order": part},
        *watched,
        fails="Weights are not updated in the backward pass",
    )
    return _with_clip_value(after)


def possible_part(state: State) -> OrderPart | None:
    """What is in a plan where a trace shows nothing that forbids it; None where something does, a
    capture failed with it, or it is in effect."""
    found = state.in_backward
    if found.reason or state.plan.order is not None or "order" in state.job.search.fails:
        return None
    return OrderPart(
        parameters=found.parameters,
        gradient_bytes=found.gradient_bytes,
        from_first=True,
        clips=found.clips,
    )


def with_its_lever(after: State) -> State:
    """A job that was captured with `possible_part` beside another part: with its lever, or without
    it where it was not in effect."""
    levers = [one for one in after.levers if one.kind != "step" or after.plan.step is not None]
    if after.plan.order is None or "order" in after.captured.trace.meta.unmet:
        return after.with_parts(order=None).with_levers(*levers)
    return _with_clip_value(after).with_levers(_lever(after), *levers)


def _lever(after: State) -> Lever:
    assert after.plan.order is not None
    return Lever(kind="order", name=NAME, values=after.plan.order.parameters, bound="")


def _with_clip_value(after: State) -> State:
    value = after.captured.trace.meta.clip_value
    if after.plan.order is None or not value:
        return after
    return after.with_parts(order=msgspec.structs.replace(after.plan.order, clip_value=value))
