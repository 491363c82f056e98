"""The lever that costs no time: weights updated in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.capturing.options import ScriptTarget
from memplan.fit.answer import Lever
from memplan.fit.judge import Verdict, judge
from memplan.fit.plans import envelope
from memplan.phases.optimizer_in_backward import updates_in_backward, with_updates_in_backward
from memplan.types.device import DeviceProfile
from memplan.types.plan import OrderPart
from memplan.worker.captures import Captured, CaptureProgram
from memplan.worker.failure import CaptureFailedError

_WORTH = 0.01
"""Part of the peak below which it is not worth a part of the plan."""
NAME = "updates in backward"


@dataclass(frozen=True)
class InBackward:
    """A job as captured with its weights updated in the backward pass."""

    part: OrderPart
    """With the promise of `captured`."""
    captured: Captured
    verdict: Verdict
    saved_bytes: int

    def lever(self) -> Lever:
        return Lever(
            kind="order",
            name=NAME,
            values=self.part.parameters,
            saved_bytes=self.saved_bytes,
        )


def find_in_backward(
    program: ScriptTarget,
    plain: Captured,
    verdict: Verdict,
    profile: DeviceProfile,
    capture: CaptureProgram,
) -> tuple[InBackward | None, str]:
    """The job with that, or a sentence on why it goes without; empty where it would not
    help, or the capture has said so.

    What the trace says it would do is simulated first. Only where that is worth it is the job
    captured again with it in effect, and then that capture counts.
    """
    found = updates_in_backward(plain.trace)
    if found.reason:
        return None, f"Weights are not updated in the backward pass: {found.reason}."
    expected = judge(with_updates_in_backward(plain.trace), profile)
    if not _worth(verdict, expected):
        return None, ""
    part = OrderPart(parameters=found.parameters, gradient_bytes=found.gradient_bytes)
    try:
        captured = capture(program, envelope(program, plain, profile, order=part), quiet=True)
    except CaptureFailedError:
        return None, "Weights are not updated in the backward pass: the script fails with it."
    after = judge(captured.trace, profile, captured.estimate)
    if not _worth(verdict, after):
        said = next((n for n in captured.estimate.notes if n.startswith("weights are")), "")
        return None, said
    saved = verdict.estimate.high_bytes - after.estimate.high_bytes
    return InBackward(promised(part, after), captured, after, saved), ""


def promised(part: OrderPart, verdict: Verdict) -> OrderPart:
    """The part with the peak of an estimate with the whole plan in effect."""
    return OrderPart(
        parameters=part.parameters,
        gradient_bytes=part.gradient_bytes,
        peak_bytes=verdict.estimate.allocated_peak_bytes,
    )


def _worth(before: Verdict, after: Verdict) -> bool:
    return after.estimate.high_bytes < (1 - _WORTH) * before.estimate.high_bytes
