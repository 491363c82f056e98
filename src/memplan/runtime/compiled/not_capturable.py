"""A training step that cannot be run from a graph, and why."""

from __future__ import annotations

from memplan.types.errors import CaptureError


class NotCapturable(CaptureError):  # noqa: N818 - a verdict on the step, which still runs plainly
    """The step depends on something that a graph would freeze or lose.

    Attributes:
        construct: what it is, for people: `if` on the value of a tensor.
        where: `file:line` of the user's code; empty when unknown.
        later: it is so in this call; another one may well be capturable.
    """

    def __init__(
        self, construct: str, where: str = "", hint: str = "", *, later: bool = False
    ) -> None:
        place = f"{where}: " if where else ""
        super().__init__(f"{place}the step cannot be captured: {construct}", hint)
        self.construct = construct
        self.where = where
        self.later = later
