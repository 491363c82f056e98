"""The lever that costs no time: weights updated in the backward pass."""

from __future__ import annotations

import msgspec

from memplan.fit.answer import Lever
from memplan.fit.judge import Verdict, judge
from memplan.fit.state import State
from memplan.phases.optimizer_in_backward import updates_in_backward, with_updates_in_backward
from memplan.types.plan import OrderPart
from memplan.worker.failure import CaptureFailedError

_WORTH = 0.01
"""Part of the peak below which it is not worth a part of the plan."""
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
    if not _worth(state.verdict, expected):
        return state
    part = OrderPart(
        parameters=found.parameters, gradient_bytes=found.gradient_bytes, from_first=True
    )
    try:
        after = _trying(state, part)
    except CaptureFailedError:
        said = "Weights are not updated in the backward pass: the script fails with it."
        return state.with_note(said)
    if not _worth(state.verdict, after.verdict):
        notes = after.captured.estimate.notes
        return state.with_note(next((n for n in notes if n.startswith("weights are")), ""))
    saved = state.verdict.estimate.high_bytes - after.verdict.estimate.high_bytes
    lever = Lever(kind="order", name=NAME, values=part.parameters, saved_bytes=saved)
    return after.with_lever(lever)


def _trying(state: State, part: OrderPart) -> State:
    try:
        return state.trying(order=part)
    except CaptureFailedError:  # something uses a gradient in the first step only
        return state.trying(order=msgspec.structs.replace(part, from_first=False))


def _worth(before: Verdict, after: Verdict) -> bool:
    return after.estimate.high_bytes < (1 - _WORTH) * before.estimate.high_bytes
