"""A trace as the allocator meets it: what every picture of it starts from."""

from __future__ import annotations

from memplan.simulate import AllocatorSettings, Timeline, settled, simulate
from memplan.simulate.replay import with_start
from memplan.types.errors import UsageError
from memplan.types.trace import Trace


def replayed(trace: Trace, *, device: int = 0) -> tuple[Trace, Timeline]:
    """The trace of one device with what was held before it and the steps that raise its peak, and
    its replay.

    Raises UsageError when the trace holds nothing of that device; what `simulate` raises for a
    trace that cannot be.
    """
    initial = {segment.device for segment in trace.meta.initial_segments}
    devices = sorted({*trace.events.device.tolist(), *initial})
    if device not in devices:
        raise UsageError(
            f"the trace holds nothing of device {device}",
            f"one of its devices: {', '.join(map(str, devices))}" if devices else "another trace",
        )
    settings = AllocatorSettings.parse(trace.meta.alloc_conf)
    whole = settled(with_start(trace, settings, device=device), settings).trace
    return whole, simulate(whole, settings, device=device)
