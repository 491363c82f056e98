"""The `Timeline`: what the allocator held after each event."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memplan.simulate.settings import AllocatorSettings
from memplan.types.trace import I32, I64, OUTSIDE, U8, EventKind


@dataclass(frozen=True)
class SegmentEvents:
    """What was asked of and given back to the device, one row each, in order."""

    event: I64
    """The event of the trace that caused it; -1 for segments from before the first event."""
    kind: U8
    """SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP or SEGMENT_UNMAP of `EventKind`."""
    bytes: I64
    stream: I32
    address: I64

    def __len__(self) -> int:
        return len(self.event)


@dataclass(frozen=True)
class Segments:
    """Device memory held over `[event, freed_event)`, one row a segment or run of pages."""

    event: I64
    """Event that caused it; -1 for those from before the first event."""
    bytes: I64
    stream: I32
    address: I64
    freed_event: I64
    """Event that gave it back; -1 when it was held to the end."""

    def __len__(self) -> int:
        return len(self.event)


@dataclass(frozen=True)
class Timeline:
    """The allocator's state after each event of a trace, for one device; sizes in bytes.

    `requested` is what the program asked for, `allocated` the blocks that hold it (rounded, with
    tails too small to split off), `active` adds blocks that another stream may still use,
    `reserved` is what is held of the device: the allocator's segments and mapped pages, and memory
    that others hold there (streams from `OUTSIDE` on), which counts in all four.
    """

    settings: AllocatorSettings
    device: int
    capacity_bytes: int | None
    requested: I64
    allocated: I64
    active: I64
    reserved: I64
    address: I64
    """The address of the block that an ALLOC row was given; -1 in other rows."""
    start_requested_bytes: int
    start_allocated_bytes: int
    start_reserved_bytes: int
    """The three before the first event."""
    segment_events: SegmentEvents
    num_alloc_retries: int
    """Requests for which all cached memory was given back before the device was asked again."""
    oom_event: int | None
    """First request that could not be served. From there on the device is taken as unlimited, so
    that the peaks say how much would have been needed."""
    oom_bytes: int
    unknown_frees: int
    """Frees of storages that were not alive."""
    alloc_event: I64
    """The ALLOC event of each storage here; -1 if it existed before, -2 if it never did."""
    free_event: I64
    """The FREE event of each storage; -1 if it lives to the end."""

    @property
    def num_ooms(self) -> int:
        return 0 if self.oom_event is None else 1

    @property
    def fits(self) -> bool | None:
        """Whether every request was served; None when no limit was set."""
        limited = self.capacity_bytes is not None or self.oom_event is not None
        return self.oom_event is None if limited else None

    @cached_property
    def requested_peak_bytes(self) -> int:
        return _peak(self.requested, self.start_requested_bytes)

    @cached_property
    def allocated_peak_bytes(self) -> int:
        return _peak(self.allocated, self.start_allocated_bytes)

    @cached_property
    def allocated_peak_event(self) -> int:
        """First event after which `allocated` is at its peak; -1 for the state before the first."""
        peak = self.allocated_peak_bytes
        return int(self.allocated.argmax()) if peak > self.start_allocated_bytes else -1

    @cached_property
    def reserved_peak_bytes(self) -> int:
        return _peak(self.reserved, self.start_reserved_bytes)

    @cached_property
    def outside(self) -> I64:
        """The part of `reserved` that does not belong to PyTorch's allocator."""
        log = self.segment_events
        theirs = log.stream >= OUTSIDE
        taken = np.where(log.kind[theirs] == EventKind.SEGMENT_ALLOC, 1, -1) * log.bytes[theirs]
        change = np.zeros(len(self.reserved), np.int64)
        np.add.at(change, log.event[theirs], taken)
        return np.cumsum(change)

    @cached_property
    def own_reserved_peak_bytes(self) -> int:
        """The reserved peak of PyTorch's allocator alone."""
        return _peak(self.reserved - self.outside, self.start_reserved_bytes)

    @cached_property
    def own_allocated_peak_bytes(self) -> int:
        """Likewise."""
        return _peak(self.allocated - self.outside, self.start_allocated_bytes)

    @cached_property
    def fullest_event(self) -> int:
        """Among the events at the reserved peak, the first with the most allocated bytes; -1 is the
        state before the first event. The allocator seldom returns segments, so the peak lasts long
        after it was reached. In a log that begins in the middle of a job it may have been reached
        before."""
        peak = self.reserved_peak_bytes
        asked = np.where(self.reserved == peak, self.requested, -1)
        most = self.start_requested_bytes if self.start_reserved_bytes == peak else -1
        return int(asked.argmax()) if int(asked.max(initial=-1)) > most else -1

    @cached_property
    def segments(self) -> Segments:
        """Lifetimes of segments, from `segment_events`."""
        return _lifetimes(self.segment_events)

    def live_at(self, event: int) -> I64:
        """Storages that the program holds after an event, in ascending order."""
        begun = (self.alloc_event >= -1) & (self.alloc_event <= event)
        ended = (self.free_event >= 0) & (self.free_event <= event)
        return np.flatnonzero(begun & ~ended)


def _peak(column: I64, start: int) -> int:
    return max(int(column.max(initial=0)), start)


def _lifetimes(log: SegmentEvents) -> Segments:
    """Pairs each range given back with the rows that it came from; pages may go in parts."""
    rows: list[list[int]] = []
    live: dict[int, int] = {}
    for event, kind, nbytes, stream, address in zip(
        *(column.tolist() for column in (log.event, log.kind, log.bytes, log.stream, log.address)),
        strict=True,
    ):
        if kind in (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_MAP):
            live[address] = len(rows)
            rows.append([event, nbytes, stream, address, -1])
            continue
        end = address + nbytes
        if (row := live.get(address)) is not None and rows[row][1] == nbytes:
            touched = [row]
        else:
            touched = [r for a, r in live.items() if a < end and a + rows[r][1] > address]
        for row in touched:
            begun, size, _, first, _ = rows[row]
            last = first + size
            del live[first]
            low, high = max(first, address), min(last, end)
            rows[row] = [begun, high - low, stream, low, event]
            for part, part_end in ((first, low), (high, last)):
                if part < part_end:
                    live[part] = len(rows)
                    rows.append([begun, part_end - part, stream, part, -1])
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    table = table[np.argsort(table[:, 0], kind="stable")]
    return Segments(
        event=table[:, 0],
        bytes=table[:, 1],
        stream=table[:, 2].astype(np.int32),
        address=table[:, 3],
        freed_event=table[:, 4],
    )


def segment_events(rows: list[tuple[int, int, int, int, int]]) -> SegmentEvents:
    """Columns of (event, kind, bytes, stream, address) rows."""
    table: npt.NDArray[np.int64] = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return SegmentEvents(
        event=table[:, 0],
        kind=table[:, 1].astype(np.uint8),
        bytes=table[:, 2],
        stream=table[:, 3].astype(np.int32),
        address=table[:, 4],
    )
