"""Recomputation inside the graphs that a job compiles with PyTorch Inductor."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.fit.answer import Lever
from memplan.fit.state import State
from memplan.phases.optimizer_in_backward import is_compiled
from memplan.types.errors import NoAnswerError
from memplan.types.plan import CompiledRegion, RegionsPart
from memplan.worker.failure import CaptureFailedError

_MOST_CAPTURES = 5
_BLOCKS = 8
"""Graphs alive together, where each is compiled by itself. How many there are makes little
difference: from a few on, what each keeps outweighs its own peak."""
_FIRST = ((1.0, 0), (1.0, _BLOCKS), (0.5, 0), (0.75, 0), (0.25, 0))
"""Shares, and graphs beside each: tried until one fits. The whole share is the solver's least peak,
not always that of the code: what backward makes again early is held until its last use."""
_CAUTION = 0.05
"""A guess between two captures goes further than necessary by this fraction of their distance."""
_WORTH_SECONDS = 0.02
"""Added time, as a fraction of the step, below which nothing is gained by less recomputation."""
_WORTH_SHARE = 0.03


@dataclass(frozen=True)
class Regions:
    """A job as captured with recomputation in its compiled graphs."""

    state: State
    share: float
    beside: int
    added_seconds: float
    added_fraction: float


class RegionSearch:
    """Looks for the least recomputation in all compiled graphs with which a job fits: how far each
    goes from none to its least peak, judged by a capture each time."""

    def __init__(self, base: State) -> None:
        """`base`: the job with what stays in effect in every capture."""
        self._base = base
        self.tried: list[Regions] = []
        """Every capture, in order."""

    def run(self) -> State:
        """The cheapest that fits; where none does, the one that needs least, if that is less than
        without. The job as it is where nothing of it is compiled by Inductor."""
        if not is_compiled(self._base.captured.trace):
            return self._base
        try:
            found = self._search(self._base.step_seconds())
        except NoAnswerError:
            return self._base
        return self._base if found is None else found.state

    def _search(self, plain: float) -> Regions | None:
        base = self._base
        without = base.needed
        for share, beside in _FIRST:
            try:
                least = self._try(share, beside, plain)
            except CaptureFailedError:
                return None
            if not _regions(least.state):
                return None
            if least.state.fits:
                break
        else:
            least = min(self.tried, key=lambda one: one.state.needed)
            return least if least.state.needed < without else None
        fits, low, low_needs = least, 0.0, without
        while len(self.tried) < _MOST_CAPTURES and fits.added_fraction > _WORTH_SECONDS:
            share = self._between(low, low_needs, fits)
            if fits.share - share < _WORTH_SHARE:
                break
            found = self._try(share, fits.beside, plain)
            if found.state.fits:
                fits = found
            else:
                low, low_needs = share, found.state.needed
        fitting = [one for one in self.tried if one.state.fits]
        return min(fitting, key=lambda one: one.added_seconds)

    def _between(self, low: float, needs: int, fits: Regions) -> float:
        """A share above `low`, which does not fit: in proportion, but never near either end."""
        over = max(needs - self._base.job.profile.total_memory_bytes, 0)
        part = over / max(needs - fits.state.needed, 1) + _CAUTION
        return low + (fits.share - low) * min(max(part, 0.15), 0.85)

    def _try(self, share: float, beside: int, plain_seconds: float) -> Regions:
        self._base.job.search.tried.append("recompute")
        after = self._base.trying(regions=RegionsPart(share=share, beside=beside))
        added = max(after.step_seconds() - plain_seconds, 0.0)
        fraction = added / plain_seconds if plain_seconds else 0.0
        part = RegionsPart(regions=after.captured.trace.meta.regions, added_seconds=added)
        after = after.with_parts(regions=part)
        after = after.with_lever(self._lever(after, added, fraction))
        after.attempted(0, after.verdict.estimate.requested_peak_bytes, fraction)
        self.tried.append(Regions(after, share, beside, added, fraction))
        return self.tried[-1]

    def _lever(self, after: State, added_seconds: float, added_fraction: float) -> Lever:
        inside = [region for region in _regions(after) if region.recomputed]
        names = list(dict.fromkeys(region.name for region in inside))
        more = f" and {len(names) - 1} more" if names[1:] else ""
        before, now = self._base.verdict.estimate, after.verdict.estimate
        return Lever(
            kind="recompute",
            name=f"compiled at {names[0]}{more}" if names else "compiled",
            groups=len(inside),
            values=sum(len(region.recomputed) for region in inside),
            saved_bytes=max(before.requested_peak_bytes - now.requested_peak_bytes, 0),
            added_seconds=added_seconds,
            added_fraction=added_fraction,
        )


def _regions(state: State) -> list[CompiledRegion]:
    part = state.plan.regions
    return part.regions if part else []
