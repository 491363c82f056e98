"""Gradients that a job clips by value (`torch.nn.utils.clip_grad_value_`): each is clipped before
its update in backward, and the job is held to what it does afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memplan.runtime.optimizer_in_backward.applied_gradient import AppliedGradient, too_late
from memplan.runtime.tape.settings import tensors_are_fake
from memplan.types.plan import OrderPart


class Clipping:
    """What a plan says of it. A capture has no numbers: there any value does until the job's own is
    seen."""

    def __init__(self, part: OrderPart, on_clip: Callable[[float], None] | None) -> None:
        self._clips, self._value = part.clips, part.clip_value
        self._on_clip = on_clip

    def why_not(self) -> str:
        """Why gradients cannot be clipped; empty where they can, or need not be."""
        known = self._value or not self._clips or tensors_are_fake()
        return "" if known else "the plan does not say to what gradients are clipped"

    @property
    def bound(self) -> float | None:
        """Gradients are clipped to ± this; None where they are not clipped."""
        return (self._value or 1.0) if self._clips else None

    def check(self, gradients: Iterable[AppliedGradient | None]) -> None:
        """Raises OptimizerInBackwardError where the job has not clipped all of them, to the value
        that they were clipped to."""
        if not self._clips:
            return
        found = {(one.lower, one.upper) for one in gradients if one is not None}
        lower, upper = found.pop() if len(found) == 1 else (None, None)
        if not self._value and upper is not None:
            self._value = float(upper)
            if self._on_clip is not None:
                self._on_clip(self._value)
        if (lower, upper) != (-self._value, self._value):
            raise too_late(f"gradients are not all clipped to ±{self._value}")
