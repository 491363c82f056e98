"""What the memory holds at the peak, and where the job stands then."""

from __future__ import annotations

import re

import numpy as np
from msgspec.structs import replace

from memplan.estimation.roles import derive_roles, requested_bytes
from memplan.simulate import Timeline
from memplan.types.estimate import Breakdown, PeakPoint, PhasePeak, TensorInfo
from memplan.types.trace import Phase, Role, Trace

LARGEST = 10
_LOOKED_AT = 20_000
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_KEYS = {
    Role.PARAMETER: "parameters",
    Role.GRADIENT: "gradients",
    Role.OPTIMIZER_STATE: "optimizer_state",
    Role.ACTIVATION: "activations",
    Role.TEMPORARY: "temporaries",
    Role.INPUT: "inputs",
    Role.WORKSPACE: "workspaces",
    Role.COMMUNICATION: "communication",
    Role.GATHERED_PARAMETER: "temporaries",
}


def peak_event(timeline: Timeline) -> int:
    """Of the events at which the reserved peak stands, the first that asks the most of it; -1 for
    the state before the first event.

    The allocator seldom gives segments back, so the peak stands long after it was reached.
    """
    if timeline.reserved_peak_event < 0:
        return -1
    at_peak = timeline.reserved == timeline.reserved_peak_bytes
    return int(np.argmax(np.where(at_peak, timeline.requested, -1)))


def point_at(trace: Trace, event: int) -> PeakPoint:
    """Where the job stands at an event; -1 for the state before the first."""
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


def phase_peaks(trace: Trace, timeline: Timeline) -> list[PhasePeak]:
    """The peak of each phase that the job was in."""
    found = []
    for phase in Phase:
        rows = np.flatnonzero(trace.events.phase == phase)
        if len(rows):
            most = int(rows[timeline.allocated[rows].argmax()])
            found.append(
                PhasePeak(
                    phase=phase.name.lower(),
                    allocated_peak_bytes=int(timeline.allocated[most]),
                    reserved_peak_bytes=int(timeline.reserved[rows].max()),
                    step=int(trace.events.step[most]),
                )
            )
    return found


class Contents:
    """The storages alive right after one event of a replay."""

    def __init__(self, trace: Trace, timeline: Timeline, event: int) -> None:
        self._trace = trace
        self._timeline = timeline
        self._event = event
        self._bytes = requested_bytes(trace, timeline)
        alive = timeline.live_at(event)
        self._alive = alive[self._bytes[alive] > 0]
        self._roles = derive_roles(trace, timeline)

    def breakdown(self, reserved: int, context: int, communicators: int = 0) -> Breakdown:
        """Bytes by purpose; sums to `reserved + context + communicators`, where the last are what
        NCCL holds for itself."""
        sums = np.zeros(max(Role) + 1, np.int64)
        np.add.at(sums, self._roles[self._alive], self._bytes[self._alive])
        by_key = dict.fromkeys(_KEYS.values(), 0)
        for role, key in _KEYS.items():
            by_key[key] += int(sums[role])
        fragmentation = reserved - sum(by_key.values())
        by_key["communication"] += communicators
        return Breakdown(**by_key, fragmentation=fragmentation, context=context)

    def gathered_bytes(self) -> int:
        """Of the temporaries, whole parameters that FSDP has gathered."""
        gathered = self._alive[self._roles[self._alive] == Role.GATHERED_PARAMETER]
        return int(self._bytes[gathered].sum())

    def point(self) -> PeakPoint:
        """Where the job stands."""
        return point_at(self._trace, self._event)

    def largest(self) -> list[TensorInfo]:
        """The largest groups of storages, each of those that were asked for alike in layers that
        differ by their number alone; by the bytes of all of a group, oldest first among equals."""
        order = np.argsort(-self._bytes[self._alive], kind="stable")[:_LOOKED_AT]
        groups: dict[TensorInfo, list[TensorInfo]] = {}
        for storage in self._alive[order]:
            tensor = self._tensor(int(storage))
            layer = replace(tensor, name=_numbered(tensor.name), module=_numbered(tensor.module))
            groups.setdefault(layer, []).append(tensor)
        alike = sorted(groups.values(), key=lambda group: -group[0].bytes * len(group))
        return [_together(group) for group in alike[:LARGEST]]

    def _tensor(self, storage: int) -> TensorInfo:
        strings, storages = self._trace.strings, self._trace.storages
        born = int(self._timeline.alloc_event[storage])
        origin = self._trace.event(born) if born >= 0 else None
        return TensorInfo(
            bytes=int(self._bytes[storage]),
            shape=strings[int(storages.shape[storage])],
            dtype=strings[int(storages.dtype[storage])],
            role=Role(int(self._roles[storage])).name.lower(),
            name=strings[int(storages.name[storage])],
            op=origin.op if origin else "",
            module=origin.module if origin else "",
            source=origin.source if origin else "",
        )


def _numbered(path: str) -> str:
    """A path of modules with its numbers left open."""
    return _NUMBER.sub("*", path)


def _together(group: list[TensorInfo]) -> TensorInfo:
    """One row for tensors whose paths differ by numbers alone."""
    return replace(
        group[0],
        count=len(group),
        name=_common([tensor.name for tensor in group]),
        module=_common([tensor.module for tensor in group]),
    )


def _common(paths: list[str]) -> str:
    parts = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(found[0] if len(set(found)) == 1 else "*" for found in parts)
