"""The lever that costs no time: weights updated in the backward pass."""

from __future__ import annotations

import msgspec

from memplan.fit.answer import Lever
from memplan.fit.judge import judge, lowers
from memplan.fit.state import State
from memplan.phases.optimizer_in_backward import updates_in_backward, with_updates_in_backward
from memplan.types.plan import OrderPart

NAME = "updates in backward"


def with_optimizer_in_backward(state: State) -> State:
    """The job with that; where it would change a number or gain little, the job as it is, with a
    sentence unless the capture has said why.

    What the trace says it would do is simulated first. Only where that is worth it is the job
    captured again with it in effect, and then that capture counts.
    """
    found = updates_in_backward(state.captured.trace)
    if found.reason:
        return state.with_note(f"Weights are not updated in the backward pass: {found.reason}.")
    expected = judge(with_updates_in_backward(state.captured.trace), state.job.profile)
    if not lowers(state.verdict, expected):
        return state
    part = OrderPart(
        parameters=found.parameters,
        gradient_bytes=found.gradient_bytes,
        from_first=True,
        clips=found.clips,
    )
    # Something may use a gradient in the first step only.
    watched = [] if found.clips else [{"order": msgspec.structs.replace(part, from_first=False)}]
    lever = Lever(kind="order", name=NAME, values=part.parameters, bound="")
    after = state.with_tried(
        lambda after: lever,
        {"order": part},
        *watched,
        fails="Weights are not updated in the backward pass",
    )
    value = after.captured.trace.meta.clip_value
    if after.plan.order is None or not value:
        return after
    return after.with_parts(order=msgspec.structs.replace(after.plan.order, clip_value=value))
