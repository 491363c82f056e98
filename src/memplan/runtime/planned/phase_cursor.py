"""Which phase of its plan a job is in."""

from __future__ import annotations

from memplan.types.trace import Phase


class PhaseCursor:
    """The number in a plan's `phases` of what the job does: the next of its kind, round and
    round."""

    def __init__(self, phases: list[str]) -> None:
        self._kinds = [name.split(" ", 1)[0] for name in phases]
        self._at = -1
        self.number = -1
        """Of the phase that the job is in; -1: one that the plan does not know."""

    def enter(self, phase: Phase) -> int:
        """The number of a phase that begins; -1 for one that the plan does not know."""
        kind, count = phase.name.lower(), len(self._kinds)
        if self.number >= 0 and self._kinds[self.number] == kind:
            return self.number
        ahead = (place % count for place in range(self._at + 1, self._at + 1 + count))
        self.number = next((place for place in ahead if self._kinds[place] == kind), -1)
        if self.number >= 0:
            self._at = self.number
        return self.number
