"""Why a request failed: what held the memory, what fragmentation cost, what would have helped.

A change of the allocator is judged by replaying the history, the failed request served at its end,
with that change and the room that the process had.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import msgspec
import numpy as np

from memplan import __version__
from memplan.estimation.estimator import gpu_info
from memplan.simulate import AllocatorSettings, Timeline, simulate
from memplan.types.builder import TraceBuilder
from memplan.types.device import DeviceProfile
from memplan.types.errors import MemplanError
from memplan.types.out_of_memory import Consumer, OomExplanation, OutOfMemory, Remedy
from memplan.types.trace import EventKind, Events, Trace

EXPANDABLE = "expandable_segments:True"
_CONSUMERS = 12
_MOVING = ("forward", "backward")
"""Phases whose requests grow with the batch, parameters' gradients aside."""


def explain_out_of_memory(
    oom: OutOfMemory, trace: Trace, profile: DeviceProfile | None = None
) -> OomExplanation:
    """The explanation of `oom`, of which `trace` is the whole history.

    `profile`: the card that the job ran on; without one the memory of other processes is not told
    apart from that of this process outside PyTorch.
    """
    notes: list[str] = []
    room = oom.room_bytes
    remedies, reproduced = _remedies(oom, trace, notes)
    unallocated = oom.reserved_bytes - oom.allocated_bytes
    missing = None if room is None else max(oom.allocated_bytes + oom.asked_bytes - room, 0)
    outside, others = _outside(oom, profile, notes)
    if others and profile is not None and room is not None:
        alone = profile.total_memory_bytes - profile.context_high_bytes - oom.reserved_bytes
        spare = alone - oom.asked_bytes
        remedies.append(
            Remedy(
                change="no other process on the GPU",
                fits=spare >= 0,
                how="by the figures",
                spare_bytes=spare,
                detail="nvidia-smi names them",
            )
        )
    by_phase: dict[str, int] = defaultdict(int)
    for block in oom.held:
        by_phase[block.phase] += block.bytes
    if missing:
        remedies += _smaller_batch(oom, missing, sum(by_phase.get(name, 0) for name in _MOVING))
    return OomExplanation(
        memplan_version=__version__,
        gpu=gpu_info(profile) if profile else None,
        fits=any(remedy.fits and remedy.how == "replayed" for remedy in remedies),
        device=oom.device,
        asked_bytes=oom.asked_bytes,
        source=oom.source,
        op=oom.op,
        phase=oom.phase,
        step=oom.step,
        stack=oom.stack,
        device_free_bytes=oom.device_free_bytes,
        room_bytes=room,
        reserved_bytes=oom.reserved_bytes,
        allocated_bytes=oom.allocated_bytes,
        requested_bytes=sum(block.requested for block in oom.held),
        waiting_bytes=sum(block.bytes for block in oom.held if block.waits),
        unallocated_bytes=unallocated,
        largest_free_bytes=oom.largest_free(),
        missing_bytes=missing,
        outside_bytes=outside,
        other_processes_bytes=others,
        by_phase=dict(sorted(by_phase.items(), key=lambda item: -item[1])),
        consumers=_consumers(oom),
        remedies=remedies,
        reproduced=reproduced,
        failures=oom.failures,
        alloc_conf=trace.meta.alloc_conf,
        notes=[*notes, *trace.meta.notes],
    )


def _consumers(oom: OutOfMemory) -> list[Consumer]:
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for block in oom.held:
        found = sums[block.source, block.op, block.phase]
        found[0] += block.bytes
        found[1] += 1
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])[:_CONSUMERS]
    return [
        Consumer(bytes=nbytes, blocks=blocks, source=source, op=op, phase=phase)
        for (source, op, phase), (nbytes, blocks) in ranked
    ]


def _remedies(oom: OutOfMemory, trace: Trace, notes: list[str]) -> tuple[list[Remedy], bool]:
    """What changes of the allocator come to, and whether the replay as it was fails as it did."""
    room = oom.room_bytes
    if room is None:
        notes.append("the snapshot does not say what the device had left, so nothing is replayed")
        return [_empty_cache(oom)], False
    served = served_at_last(trace, oom)
    remedies = []
    reproduced = False
    try:
        settings = AllocatorSettings.parse(trace.meta.alloc_conf)
        as_it_was = simulate(served, settings, capacity_bytes=room, device=oom.device)
        reproduced = as_it_was.oom_event == len(served) - 1
        if as_it_was.oom_event is None:
            notes.append("replayed as it was recorded, the request is served: take the replays of "
                         "changes with care")  # fmt: skip
        elif not reproduced:
            notes.append("replayed as it was recorded, an earlier request fails already: other "
                         "processes may have taken memory since then")  # fmt: skip
        if not settings.expandable_segments:
            changed = replace(settings, expandable_segments=True)
            fresh = _without_initial_gaps(served, oom.device)
            timeline = simulate(fresh, changed, capacity_bytes=room, device=oom.device)
            remedies.append(_expandable(timeline, room, fresh is not served))
    except MemplanError as error:
        notes.append(f"the history cannot be replayed: {error.message}")
    return [*remedies, _empty_cache(oom)], reproduced


def _expandable(timeline: Timeline, room: int, packed: bool) -> Remedy:
    spare = room - timeline.reserved_peak_bytes
    detail = "what was held before the history began is taken to lie without gaps" if packed else ""
    return Remedy(
        change=f"PYTORCH_ALLOC_CONF={EXPANDABLE}",
        fits=timeline.oom_event is None,
        how="replayed",
        # A full card makes the allocator give pages back, so a peak beyond the room is no verdict.
        spare_bytes=max(spare, 0) if timeline.oom_event is None else min(spare, -1),
        detail=detail,
    )


def _empty_cache(oom: OutOfMemory) -> Remedy:
    """PyTorch has given back every segment without a block in it before it reports failure."""
    left = (oom.device_free_bytes or 0) - oom.asked_bytes
    return Remedy(
        change="torch.cuda.empty_cache() before it",
        fits=False,
        how="by PyTorch's rules",
        spare_bytes=min(left, -1),
        detail="PyTorch had given back every free segment before it gave up",
    )


def _smaller_batch(oom: OutOfMemory, missing: int, moving: int) -> list[Remedy]:
    """How much smaller a batch would have to be for `missing` bytes, if all `moving` bytes and the
    request itself are proportional to it."""
    if oom.phase in _MOVING:
        moving += oom.asked_bytes
    fraction = missing / moving if moving else 1.0
    if fraction >= 1.0:
        return []
    return [
        Remedy(
            change=f"a batch smaller by {math.ceil(100 * fraction)} % or more",
            fits=True,
            how="by the figures",
            spare_bytes=0,
            detail="if what forward and backward asked for is in proportion to it; "
            "fragmentation not counted",
        )
    ]


def served_at_last(trace: Trace, oom: OutOfMemory) -> Trace:
    """The device's history up to the failure, which becomes an allocation."""
    count = oom.event + 1
    here = np.flatnonzero(trace.events.device[:count] == oom.device)
    columns = {
        name: getattr(trace.events, name)[here].copy() for name in Events.__dataclass_fields__
    }
    events = Events(**columns)
    storages = len(trace.storages)
    events.kind[-1] = EventKind.ALLOC
    events.storage[-1] = storages
    earlier = events.kind == EventKind.OUT_OF_MEMORY
    events.kind[earlier] = EventKind.MARK
    rows = {
        name: np.append(getattr(trace.storages, name), 0).astype(
            getattr(trace.storages, name).dtype
        )
        for name in type(trace.storages).__dataclass_fields__
    }
    return replace(trace, events=events, storages=type(trace.storages)(**rows))


def _without_initial_gaps(trace: Trace, device: int) -> Trace:
    """The history with what was there before as allocations at its beginning, in the order of
    their addresses: segments of another kind cannot be taken over."""
    initial = [one for one in trace.meta.initial_segments if one.device == device]
    blocks = [
        (segment.stream, block)
        for segment in sorted(initial, key=lambda one: one.address)
        for block in segment.blocks
        if block.storage != -1
    ]
    if not blocks:
        return trace
    builder = TraceBuilder()
    for stream, block in blocks:
        builder.append(
            EventKind.ALLOC, block.storage, block.requested_bytes, stream=stream, device=device
        )
    before = builder.build(trace.meta).events
    columns = {
        name: np.concatenate((getattr(before, name), getattr(trace.events, name))).astype(
            getattr(trace.events, name).dtype
        )
        for name in Events.__dataclass_fields__
    }
    meta = msgspec.structs.replace(trace.meta, initial_segments=[])
    return replace(trace, meta=meta, events=Events(**columns))


def _outside(
    oom: OutOfMemory, profile: DeviceProfile | None, notes: list[str]
) -> tuple[int | None, int | None]:
    """Bytes of the card that are neither free nor in this process's segments; and how much of them
    exceeds the largest context of the process."""
    if profile is None or oom.room_bytes is None:
        return None, None
    outside = profile.total_memory_bytes - oom.room_bytes
    if outside < 0:
        notes.append(f"the process had more than {profile.name} holds: it ran on a larger card")
        return None, None
    return outside, max(outside - profile.context_high_bytes, 0)
