"""Answers to questions about device values that nobody can know here.

Each answer follows from where the value comes from, is recorded as an assumption, and is bounded:
a script that waits in a loop for an unknown value to change gets the other answer after a while,
and an error when that does not help.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from memplan.types.errors import CaptureError
from memplan.types.trace import Assumption

if TYPE_CHECKING:
    from collections.abc import Callable

_TRUE_ORIGINS = frozenset({"isfinite", "all", "isclose", "equal", "_is_all_true"})
_PATIENCE = 1_000
_LIMIT = 20_000


class Assumptions:
    """Counts what had to be assumed, by kind, text, operator and source line."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str, str]] = Counter()

    def add(self, kind: str, text: str, *, op: str = "", source: str = "") -> None:
        self._counts[kind, text, op, source] += 1

    def listed(self) -> list[Assumption]:
        """All of them, the most frequent first."""
        return [
            Assumption(kind=kind, text=text, op=op, source=source, count=count)
            for (kind, text, op, source), count in self._counts.most_common()
        ]


class Answers:
    """Python values for device scalars of unknown content."""

    def __init__(self, assumptions: Assumptions, source: Callable[[], str]) -> None:
        self._assumptions = assumptions
        self._source = source
        self._asked: Counter[str] = Counter()

    def new_step(self) -> None:
        """The loop guard counts within one step."""
        self._asked.clear()

    def scalar(self, dtype: torch.dtype, origin: str) -> bool | int | float | complex:
        """A value for a one-element tensor. Raises CaptureError when a loop never ends."""
        source = self._source()
        self._asked[source] += 1
        times = self._asked[source]
        if times > _LIMIT:
            raise CaptureError(
                f"{source}: asked {times:,} times in one step for a device value that cannot be "
                f"known here (from {origin or 'the model'})",
                "give the loop a fixed bound, or skip it when estimating",
            )
        impatient = times > _PATIENCE and times % 2 == 0
        if dtype == torch.bool:
            answer = (origin in _TRUE_ORIGINS) != impatient
            self._assumptions.add(
                "branch", f"a condition on a device value is {answer}", op=origin, source=source
            )
            return answer
        if dtype.is_floating_point or dtype.is_complex:
            value = 0.0 if impatient else 1.0
            self._assumptions.add(
                "value", f"a device value read by the script is {value}", op=origin, source=source
            )
            return value
        self._assumptions.add(
            "value", "an integer device value read by the script is 1", op=origin, source=source
        )
        return 1
