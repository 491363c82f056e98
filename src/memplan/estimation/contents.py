"""What the memory holds at the peak, and where the job stands then."""

from __future__ import annotations

import re

import numpy as np
from msgspec.structs import replace

from memplan.simulate import Timeline
from memplan.simulate.roles import (
    CATEGORIES,
    derive_roles,
    nameless_bytes,
    paths_below_roots,
    requested_bytes,
)
from memplan.types.estimate import Breakdown, HeldPart, PeakPoint, PhasePeak, TensorInfo
from memplan.types.trace import I64, Phase, Role, Trace

LARGEST = 10
HELD = 200
_LOOKED_AT = 20_000
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_NAMED = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE, Role.GATHERED_PARAMETER)
"""Roles of storages that bear a parameter's name, if any."""


def point_at(trace: Trace, event: int) -> PeakPoint:
    """The position in the job at an event; -1 is the state before the first one."""
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
    allocated, reserved = (
        column - timeline.outside for column in (timeline.allocated, timeline.reserved)
    )
    found = []
    for phase in Phase:
        rows = np.flatnonzero(trace.events.phase == phase)
        if len(rows):
            most = int(rows[allocated[rows].argmax()])
            found.append(
                PhasePeak(
                    phase=phase.name.lower(),
                    allocated_peak_bytes=int(allocated[most]),
                    reserved_peak_bytes=int(reserved[rows].max()),
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
        self._nameless = nameless_bytes(trace, timeline.device)

    def breakdown(
        self, reserved: int, context: int, communicators: int = 0, engines: int = 0
    ) -> Breakdown:
        """Bytes by purpose; they sum to the arguments, of which the last two are what NCCL holds
        for itself, and the contexts of engines."""
        sums = np.zeros(max(Role) + 1, np.int64)
        np.add.at(sums, self._roles[self._alive], self._bytes[self._alive])
        by_key = dict.fromkeys(CATEGORIES.values(), 0)
        for role, key in CATEGORIES.items():
            by_key[key] += int(sums[role])
        by_key["unknown"] = self._nameless
        fragmentation = reserved - sum(by_key.values())
        by_key["communication"] += communicators
        by_key["engine"] += engines
        return Breakdown(**by_key, fragmentation=fragmentation, context=context)

    def gathered_bytes(self) -> int:
        """Bytes of whole parameters that FSDP has gathered; they are part of the temporaries."""
        gathered = self._alive[self._roles[self._alive] == Role.GATHERED_PARAMETER]
        return int(self._bytes[gathered].sum())

    def point(self) -> PeakPoint:
        """The position in the job."""
        return point_at(self._trace, self._event)

    def largest(self) -> list[TensorInfo]:
        """The largest groups of storages, each of those that were asked for alike in layers that
        differ by their number alone; by the bytes of all of a group, oldest first among equals."""
        order = np.argsort(-self._bytes[self._alive], kind="stable")[:_LOOKED_AT]
        groups: dict[TensorInfo, list[TensorInfo]] = {}
        for storage in self._alive[order]:
            tensor = self._tensor(int(storage))
            layer = replace(tensor, name=numbered(tensor.name), module=numbered(tensor.module))
            groups.setdefault(layer, []).append(tensor)
        alike = sorted(groups.values(), key=lambda group: -group[0].bytes * len(group))
        return [_together(group) for group in alike[:LARGEST]]

    def held(self) -> list[HeldPart]:
        """All that is alive by role, module and source line, the largest first; beyond `HELD` rows
        the last one has the rest."""
        origins, of = np.unique(self._origins(), axis=0, return_inverse=True)
        sums = np.zeros((len(origins), 2), np.int64)
        np.add.at(sums, of.reshape(-1), np.stack((self._bytes[self._alive], self._alive >= 0), 1))
        strings, owners = self._trace.strings, paths_below_roots(self._trace)
        found: dict[tuple[str, str, str], list[int]] = {}
        for (role, module, source, name), (size, count) in zip(
            origins.tolist(), sums.tolist(), strict=True
        ):
            path = strings[module]
            if not path and role in _NAMED:
                owner = strings[name].rpartition(".")[0]
                path = owners.get(owner, owner) if strings[name] else ""
            key = Role(role).name.lower(), numbered(path), strings[source]
            part = found.setdefault(key, [0, 0])
            part[0] += size
            part[1] += count
        if self._nameless:
            found["unknown", "", ""] = [self._nameless, 1]
        rows = sorted(found.items(), key=lambda item: -item[1][0])
        shown = rows if len(rows) <= HELD else rows[: HELD - 1]
        parts = [
            HeldPart(role=role, module=module, source=source, bytes=size, count=count)
            for (role, module, source), (size, count) in shown
        ]
        if rest := [part for _, part in rows[len(shown) :]]:
            size, count = map(sum, zip(*rest, strict=True))
            parts.append(HeldPart(role="", module="", source="", bytes=size, count=count))
        return parts

    def _origins(self) -> I64:
        """One row a storage alive: its role, and the strings of its module, source and name."""
        events, alive = self._trace.events, self._alive
        origins = np.zeros((len(alive), 4), np.int64)
        origins[:, 0] = self._roles[alive]
        born = self._timeline.alloc_event[alive]
        seen = born >= 0
        origins[seen, 1] = events.module[born[seen]]
        origins[seen, 2] = events.source[born[seen]]
        origins[:, 3] = self._trace.storages.name[alive]
        return origins

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


def numbered(path: str) -> str:
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
