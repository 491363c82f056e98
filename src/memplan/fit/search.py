"""What a search has come to so far: every plan that was captured, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from memplan.fit.answer import Attempt, Lever
from memplan.fit.judge import Verdict
from memplan.types.plan import Plan

Progress = Callable[[str], None]
_SOLVER_SECONDS = 60.0
"""The most CPU time of all solvers together, so that a plan does not depend on the load."""
_SHARE = 0.25
"""The most of what is left that one solver takes."""
_LEAST_SECONDS = 0.2


@dataclass(frozen=True)
class Found:
    """A plan that the script was captured with."""

    plan: Plan
    """The plan, with its promises."""
    levers: tuple[Lever, ...]
    notes: tuple[str, ...]
    verdict: Verdict
    needed: int
    """Bytes of the least card that it fits."""

    @property
    def fits(self) -> bool:
        return self.verdict.fits

    @property
    def added_seconds(self) -> float:
        return sum(lever.added_seconds for lever in self.levers)

    @property
    def retries(self) -> int:
        """Requests before which the allocator has to give memory back to the card."""
        return self.verdict.estimate.num_alloc_retries

    @property
    def exact(self) -> bool:
        return all(lever.numbers == "exact" for lever in self.levers)


@dataclass
class Search:
    """Grows while a search goes on; the answer is chosen from it, whenever it ends."""

    progress: Progress = lambda text: None
    found: list[Found] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    """Kinds of levers."""
    fails: set[str] = field(default_factory=set)
    """Parts of plans that the script cannot have or fails with, as far as that is known."""
    captures: int = 0
    _solver_seconds: float = _SOLVER_SECONDS
    _began: float = field(default_factory=time.monotonic)
    _text: str = ""
    _expected: int = 0
    _shown: bool = True

    def say(self, text: str, captures: int, *, once_begun: bool = False) -> None:
        """What is tried now, and how many captures that usually takes. `once_begun`: not shown
        before one of them begins, for there may be nothing to try, nor twice."""
        self._shown &= once_begun and text == self._text
        self._text, self._expected = text, captures
        if not once_begun:
            self._show()

    def begins(self) -> None:
        if not self._shown:
            self._show()

    def captured(self) -> None:
        self.captures += 1
        self._expected -= 1
        if self._expected > 0:
            self._show()

    def _show(self) -> None:
        """Show progress, with the time left if the current attempt succeeds."""
        left, self._shown = "", True
        if self.captures:
            seconds = self._expected * (time.monotonic() - self._began) / self.captures
            left = f" (capture {self.captures + 1}, about {seconds:.0f} s left if this is enough)"
        self.progress(f"{self._text}{left}")

    def solving_seconds(self, most: float) -> float:
        """Seconds for the next solver: so much that a few more have a share."""
        return max(min(most, self._solver_seconds * _SHARE), _LEAST_SECONDS)

    def solved(self, began: float) -> None:
        """A solver that began at that `time.process_time()` has ended."""
        self._solver_seconds -= time.process_time() - began
