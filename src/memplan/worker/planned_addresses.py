"""The estimate of a job that runs on the planned allocator."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memplan.estimation import estimate
from memplan.estimation.interval import Replay
from memplan.layout.serve import timeline_under
from memplan.simulate.simulator import BOUNDS
from memplan.types.allocation import Requests, read_requests
from memplan.types.device import DeviceProfile
from memplan.types.estimate import Estimate
from memplan.types.plan import AllocationPart
from memplan.types.trace import Trace


def estimate_under(
    trace: Trace,
    profile: DeviceProfile | None,
    part: AllocationPart,
    requests: Requests | None = None,
) -> Estimate:
    """The estimate with planned addresses. `requests`: those of the part, if known already. Raises
    FormatError for a plan that is not valid."""
    known = read_requests(part) if requests is None else requests
    return estimate(trace, profile, player=lambda card: _Planned(part, known, card))


@dataclass(frozen=True)
class _Planned:
    """A `Player` of the planned allocator. It gives nothing back for want of room, so a job fits
    or it does not."""

    part: AllocationPart
    requests: Requests
    card: DeviceProfile

    def play(self, trace: Trace, bounds: str, reuse: str, taken: int) -> Replay:
        events = trace.events
        sized = replace(events, bytes=getattr(events, BOUNDS[bounds]))
        timeline = timeline_under(replace(trace, events=sized), self.part, self.requests)
        room = self.card.total_memory_bytes - taken
        return Replay(timeline, fits=timeline.reserved_peak_bytes <= room, squeezed=False)
