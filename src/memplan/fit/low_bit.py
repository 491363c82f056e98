"""The lever that changes the method: Adam's moments in 8 bits."""

from __future__ import annotations

from importlib.util import find_spec

from memplan.fit.answer import Lever
from memplan.fit.host_state import state_bytes
from memplan.fit.judge import judge, lowers
from memplan.fit.small_state import in_8bit
from memplan.fit.state import State
from memplan.report.text import format_bytes
from memplan.types.plan import LowBitPart

_FAILS = "The optimizer's state is not in 8 bits"


def with_low_bit_state(state: State) -> State:
    """The job with that; as it is, with a sentence where there is one to say, where torchao is
    missing, the optimizer is another one, or little would be gained.

    The time added is by how much the estimated step is longer.
    """
    if state.plan.state is not None or not state_bytes(state.captured.trace):
        return state
    if not lowers(state.verdict, judge(in_8bit(state.captured.trace), state.job.profile)):
        return state
    if find_spec("torchao") is None:
        return state.with_note(f"{_FAILS}: torchao is not installed here; pip install torchao.")

    def lever(after: State) -> Lever:
        before, now = (one.captured.estimate.step_seconds or 0.0 for one in (state, after))
        saved = state_bytes(state.captured.trace) - state_bytes(after.captured.trace)
        return Lever(
            kind="low_bit",
            name=f"{format_bytes(saved)} less of Adam's moments",
            numbers="numbers",
            added_seconds=max(now - before, 0.0),
            bound="compute",
        )

    after = state.with_tried(lever, {"low_bit": LowBitPart()}, fails=_FAILS)
    if after.plan.low_bit is None:
        return after
    part = LowBitPart(
        state_bytes=state_bytes(after.captured.trace), added_seconds=after.levers[-1].added_seconds
    )
    return after.with_parts(low_bit=part)
