"""`estimate`: the whole answer, from a trace and a card."""

from __future__ import annotations

import numpy as np

from memplan import __version__
from memplan.estimate.curve import thin
from memplan.estimate.interval import Interval, find_interval
from memplan.estimate.roles import Lifetimes, derive_roles, lifetimes
from memplan.simulate import AllocatorSettings, Timeline
from memplan.types.device import DEFAULT_PROFILE, DeviceProfile, find_profile
from memplan.types.errors import UsageError
from memplan.types.estimate import Breakdown, Estimate, GpuInfo, PeakPoint, TensorInfo
from memplan.types.trace import U8, Role, Trace

LARGEST = 10
_BREAKDOWN_KEY = {
    Role.PARAMETER: "parameters",
    Role.GRADIENT: "gradients",
    Role.OPTIMIZER_STATE: "optimizer_state",
    Role.ACTIVATION: "activations",
    Role.TEMPORARY: "temporaries",
    Role.INPUT: "inputs",
    Role.WORKSPACE: "workspaces",
    Role.COMMUNICATION: "communication",
}


def estimate(
    trace: Trace,
    profile: DeviceProfile | None = None,
    settings: AllocatorSettings | None = None,
) -> Estimate:
    """Peak memory of a captured job.

    Args:
        trace: the job; its first device is the one that counts.
        profile: the card of the verdict. Without one `fits` is None, and the context is that of
            the card that the job saw while it was captured.
        settings: the allocator's; by default those that the trace carries.

    Raises UsageError for allocator settings that PyTorch would refuse.
    """
    if settings is None:
        settings = AllocatorSettings.parse(trace.meta.alloc_conf)
    card = profile or _seen_card(trace)
    interval = find_interval(trace, settings, card, limited=profile is not None)
    timeline = interval.expected.timeline
    event = _peak_event(timeline)
    lives = lifetimes(trace)
    roles = derive_roles(trace, lives)
    low, peak, high = interval.peak
    fits = None if profile is None else high <= profile.total_memory_bytes
    meta = trace.meta
    return Estimate(
        memplan_version=__version__,
        torch_version=meta.torch_version,
        gpu=None if profile is None else _gpu_info(profile),
        fits=fits,
        peak_bytes=peak,
        low_bytes=low,
        high_bytes=high,
        spare_bytes=card.total_memory_bytes - peak if fits else None,
        missing_bytes=high - card.total_memory_bytes if fits is False else None,
        reserved_peak_bytes=interval.reserved[1],
        reserved_low_bytes=interval.reserved[0],
        reserved_high_bytes=interval.reserved[2],
        allocated_peak_bytes=interval.allocated[1],
        allocated_low_bytes=interval.allocated[0],
        allocated_high_bytes=interval.allocated[2],
        requested_peak_bytes=int(timeline.requested_peak_bytes),
        breakdown=_breakdown(lives, roles, event, interval.reserved[1], card.context_bytes),
        peak=_peak_point(trace, event),
        largest=_largest(trace, lives, roles, event),
        assumptions=list(meta.assumptions),
        kernels=list(meta.kernels),
        curve=thin(trace, timeline),
        steps=meta.optimizer_steps,
        stop_reason=meta.stop_reason,
        method=meta.method,
        alloc_conf=meta.alloc_conf,
        num_alloc_retries=int(timeline.num_alloc_retries),
        events=len(trace),
        host_peak_bytes=meta.host_peak_bytes,
        command=list(meta.command),
        notes=[*_notes(interval, profile, card), *meta.notes],
    )


def _seen_card(trace: Trace) -> DeviceProfile:
    try:
        return find_profile(trace.meta.gpu)
    except UsageError:
        return find_profile(DEFAULT_PROFILE)


def _gpu_info(profile: DeviceProfile) -> GpuInfo:
    return GpuInfo(
        name=profile.name,
        device_name=profile.device_name,
        capability=profile.capability_text,
        total_bytes=profile.total_memory_bytes,
        context_bytes=profile.context_bytes,
        context_low_bytes=profile.context_low_bytes,
        context_high_bytes=profile.context_high_bytes,
    )


def _peak_event(timeline: Timeline) -> int:
    """Of the events at which the reserved peak stands, the first that asks the most of it: the
    allocator seldom gives segments back, so the peak stands long after it was reached."""
    if len(timeline.reserved) == 0:
        return -1
    at_peak = timeline.reserved == timeline.reserved.max()
    return int(np.argmax(np.where(at_peak, timeline.requested, -1)))


def _breakdown(lives: Lifetimes, roles: U8, event: int, reserved: int, context: int) -> Breakdown:
    alive = lives.alive_at(event)
    sums = np.zeros(max(Role) + 1, np.int64)
    np.add.at(sums, roles[alive], lives.bytes[alive])
    by_key = {key: int(sums[role]) for role, key in _BREAKDOWN_KEY.items()}
    return Breakdown(
        **by_key, fragmentation=reserved - int(lives.bytes[alive].sum()), context=context
    )


def _peak_point(trace: Trace, event: int) -> PeakPoint:
    if event < 0:
        return PeakPoint(event=-1)
    row = trace.event(event)
    return PeakPoint(
        event=event,
        op=row.op,
        module=row.module,
        phase=row.phase.name.lower(),
        step=row.step,
        source=row.source,
    )


def _largest(trace: Trace, lives: Lifetimes, roles: U8, event: int) -> list[TensorInfo]:
    alive = lives.alive_at(event)
    order = np.argsort(-lives.bytes[alive], kind="stable")[:LARGEST]
    return [_tensor_info(trace, lives, roles, int(storage)) for storage in alive[order]]


def _tensor_info(trace: Trace, lives: Lifetimes, roles: U8, storage: int) -> TensorInfo:
    strings, storages = trace.strings, trace.storages
    born = int(lives.alloc[storage])
    origin = trace.event(born) if born >= 0 else None
    return TensorInfo(
        bytes=int(lives.bytes[storage]),
        shape=strings[int(storages.shape[storage])],
        dtype=strings[int(storages.dtype[storage])],
        role=Role(int(roles[storage])).name.lower(),
        name=strings[int(storages.name[storage])],
        op=origin.op if origin else "",
        module=origin.module if origin else "",
        source=origin.source if origin else "",
    )


def _notes(interval: Interval, profile: DeviceProfile | None, card: DeviceProfile) -> list[str]:
    if profile is None:
        return [f"No card was named, so there is no verdict; the job saw {card.device_name}."]
    if interval.high.fits and (interval.high.squeezed or interval.expected.squeezed):
        return [
            "It fits only because PyTorch gives cached memory back when the card is full and "
            "tries again; expect slower steps."
        ]
    return []
