"""Recomputation inside the graphs that a job compiles with PyTorch Inductor."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memplan.capturing.options import ScriptTarget
from memplan.fit.answer import Attempt, Lever
from memplan.fit.judge import Verdict, judge, least_card
from memplan.fit.plans import envelope
from memplan.phases import step_graph
from memplan.types.device import DeviceProfile
from memplan.types.errors import NoAnswerError
from memplan.types.plan import OrderPart, RegionsPart
from memplan.types.trace import Trace
from memplan.worker.captures import Captured, CaptureProgram
from memplan.worker.failure import CaptureFailedError

_MOST_CAPTURES = 5
_FIRST_SHARES = (1.0, 0.5, 0.75, 0.25)
"""Tried until one fits. The whole share is the solver's least peak, not always that of the code:
what backward makes again early is held until its last use."""
_CAUTION = 0.05
"""Of the range between two captures, that a guess between them goes further than it has to."""
_WORTH_SECONDS = 0.02
"""Added time, as a fraction of the step, below which nothing is gained by less recomputation."""
_WORTH_SHARE = 0.03


@dataclass(frozen=True)
class Regions:
    """A job as captured with recomputation in its compiled graphs."""

    part: RegionsPart
    """With the promise of `captured`."""
    captured: Captured
    verdict: Verdict
    needed: int
    """Bytes of the least card that it fits."""
    share: float
    plain_seconds: float
    saved_bytes: int

    @property
    def added_fraction(self) -> float:
        return self.part.added_seconds / self.plain_seconds if self.plain_seconds else 0.0

    def lever(self) -> Lever:
        inside = [region for region in self.part.regions if region.recomputed]
        names = list(dict.fromkeys(region.name for region in inside))
        more = f" and {len(names) - 1} more" if names[1:] else ""
        return Lever(
            kind="recompute",
            name=f"compiled at {names[0]}{more}" if names else "compiled",
            groups=len(inside),
            values=sum(len(region.recomputed) for region in inside),
            saved_bytes=self.saved_bytes,
            added_seconds=self.part.added_seconds,
            added_fraction=self.added_fraction,
        )

    def attempt(self) -> Attempt:
        estimate = self.verdict.estimate
        return Attempt(
            budget_bytes=0,
            planned_bytes=estimate.requested_peak_bytes,
            requested_bytes=estimate.requested_peak_bytes,
            peak_bytes=estimate.peak_bytes,
            high_bytes=estimate.high_bytes,
            least_card_bytes=self.needed,
            alloc_conf=self.verdict.alloc_conf,
            fits=self.verdict.fits,
            added_fraction=self.added_fraction,
        )


class RegionSearch:
    """Looks for the least recomputation in all compiled graphs with which a job fits: how far each
    goes from none to its least peak, judged by a capture each time."""

    def __init__(
        self,
        program: ScriptTarget,
        base: Captured,
        verdict: Verdict,
        profile: DeviceProfile,
        capture: CaptureProgram,
        order: OrderPart | None,
    ) -> None:
        """`order`: in effect in `base`, and in every capture."""
        self._program = program
        self._base = base
        self._verdict = verdict
        self._profile = profile
        self._capture = capture
        self._order = order
        self.tried: list[Regions] = []
        """Every capture, in order."""

    def run(self) -> Regions | None:
        """The cheapest that fits; where none does, the one that needs least, if that is less than
        without. None where nothing of the job is compiled by Inductor."""
        if not _is_compiled(self._base.trace):
            return None
        try:
            plain = _seconds(self._base.trace, self._profile)
        except NoAnswerError:
            return None
        without = least_card(self._base.trace, self._profile, self._verdict)
        for share in _FIRST_SHARES:
            try:
                least = self._try(share, plain)
            except CaptureFailedError:
                return None
            if not least.part.regions:
                return None
            if least.verdict.fits:
                break
        else:
            least = min(self.tried, key=lambda one: one.needed)
            return least if least.needed < without else None
        fits, low, low_needs = least, 0.0, without
        while len(self.tried) < _MOST_CAPTURES and fits.added_fraction > _WORTH_SECONDS:
            share = self._between(low, low_needs, fits)
            if fits.share - share < _WORTH_SHARE:
                break
            found = self._try(share, plain)
            if found.verdict.fits:
                fits = found
            else:
                low, low_needs = share, found.needed
        fitting = [one for one in self.tried if one.verdict.fits]
        return min(fitting, key=lambda one: one.part.added_seconds)

    def _between(self, low: float, needs: int, fits: Regions) -> float:
        """A share above `low`, which does not fit: in proportion, but never near either end."""
        over = max(needs - self._profile.total_memory_bytes, 0)
        part = over / max(needs - fits.needed, 1) + _CAUTION
        return low + (fits.share - low) * min(max(part, 0.15), 0.85)

    def _try(self, share: float, plain_seconds: float) -> Regions:
        asked = RegionsPart(share=share)
        plan = envelope(self._program, self._base, self._profile, order=self._order, regions=asked)
        captured = self._capture(self._program, plan, quiet=True)
        verdict = judge(captured.trace, self._profile, captured.estimate)
        before = self._verdict.estimate.requested_peak_bytes
        part = RegionsPart(
            regions=captured.trace.meta.regions,
            peak_bytes=verdict.estimate.allocated_peak_bytes,
            added_seconds=max(_seconds(captured.trace, self._profile) - plain_seconds, 0.0),
        )
        found = Regions(
            part,
            captured,
            verdict,
            least_card(captured.trace, self._profile, verdict),
            share,
            plain_seconds,
            max(before - verdict.estimate.requested_peak_bytes, 0),
        )
        self.tried.append(found)
        return found


def promised(part: RegionsPart, verdict: Verdict) -> RegionsPart:
    """The part with the peak of an estimate with the whole plan in effect."""
    return msgspec.structs.replace(part, peak_bytes=verdict.estimate.allocated_peak_bytes)


def _is_compiled(trace: Trace) -> bool:
    return any(name.startswith("inductor.") for name in trace.strings)


def _seconds(trace: Trace, profile: DeviceProfile) -> float:
    """Of the passes of a step."""
    graph = step_graph(trace, profile)
    return float(graph.ops.seconds.sum()) * graph.passes
