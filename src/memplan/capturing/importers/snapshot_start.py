"""The state before a snapshot's history began, by walking the history backwards from its end.

The history is a ring buffer: it usually begins in the middle of a run. A snapshot holds the state
at its end, so undoing every entry, last first, gives the segments and blocks at its beginning.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from memplan.capturing.importers.snapshot_schema import DEFAULT_POOL, Entry, Pool, SnapshotSegment

_ALIGNMENT = 512
_SMALL_SEGMENT = 2 << 20
_LARGEST_TAIL = 1 << 20
"""Blocks of the large pool are not split where the rest would be this or less; free blocks there
are larger, so a smaller hole belongs to the block below it."""


@dataclass
class StartBlock:
    """A block in use before the first entry; `[address, address + bytes)`."""

    address: int
    requested: int
    bytes: int = 0
    """0 until known."""
    pending: bool = False
    """Released by the program, still awaiting another stream."""


@dataclass
class StartSegment:
    """Memory held before the first entry; `[address, end)`."""

    address: int
    end: int
    stream: int
    expandable: bool
    pool: Pool = DEFAULT_POOL
    blocks: list[StartBlock] = field(default_factory=list)


@dataclass
class StartState:
    """What a device's allocator held before the first entry of its history."""

    segments: list[StartSegment]
    contradictions: int
    """Entries that the state after them rules out, as when recording was switched off and on."""


def rewind(segments: Iterable[SnapshotSegment], entries: list[Entry]) -> StartState:
    """Undo `entries` (one device's, oldest first) from the state that `segments` shows. Those that
    do not tell their pool are told it, where their segment was still there at the end."""
    undo = _Rewind(segments)
    for entry in reversed(entries):
        undo.find_pool(entry)
        undo.entry(entry)
    ranges = sorted(undo.ranges.values(), key=lambda r: r.address)
    lost = _place(undo.blocks, ranges)
    for segment in ranges:
        _size_blocks(segment)
    return StartState(ranges, undo.contradictions + lost)


class _Rewind:
    """Segments and blocks in use, at a moment that moves backwards."""

    def __init__(self, segments: Iterable[SnapshotSegment]) -> None:
        self.ranges: dict[int, StartSegment] = {}
        self.blocks: dict[int, StartBlock] = {}
        self.contradictions = 0
        self._starts: list[int] = []
        """The addresses of `ranges`, in order."""
        self._by_end: dict[int, int] = {}
        """Address of the range that ends at a place."""
        self._private = False
        """Whether there are private pools."""
        for segment in segments:
            end = segment.address + segment.total_size
            expandable, pool = segment.is_expandable, segment.segment_pool_id
            self._private |= pool != DEFAULT_POOL
            self._put(StartSegment(segment.address, end, segment.stream, expandable, pool))
            at = segment.address
            for block in segment.blocks:
                at = at if block.address is None else block.address
                if block.state != "inactive":
                    requested = block.size if block.requested_size is None else block.requested_size
                    pending = block.state != "active_allocated"
                    self.blocks[at] = StartBlock(at, requested, block.size, pending)
                at += block.size

    def find_pool(self, entry: Entry) -> None:
        """Tell an entry its pool, by the segment that holds its address after it."""
        if self._private and entry.pool_id is None:
            holder = self._holder(entry.addr)
            if holder is not None and entry.addr < holder.end:
                entry.pool_id = holder.pool

    def entry(self, entry: Entry) -> None:
        address, size = entry.addr, entry.size
        match entry.action:
            case "alloc":
                self._drop(self.blocks.pop(address, None))
            case "free_completed":
                self._expect(address not in self.blocks)
                self.blocks[address] = StartBlock(address, size, pending=True)
            case "free_requested":
                self.blocks.setdefault(address, StartBlock(address, size)).pending = False
            case "free":
                self._expect(address not in self.blocks)
                self.blocks[address] = StartBlock(address, size)
            case "segment_alloc":
                self._drop(self._take(address))
            case "segment_free":
                self._expect(address not in self.ranges)
                pool = entry.pool_id or DEFAULT_POOL
                self._put(StartSegment(address, address + size, entry.stream, False, pool))
            case "segment_map":
                self._unmap(address, address + size)
            case "segment_unmap":
                self._map(address, address + size, entry)

    def _expect(self, holds: bool) -> None:
        self.contradictions += not holds

    def _drop(self, found: object | None) -> None:
        self._expect(found is not None)

    def _put(self, found: StartSegment) -> None:
        self._take(found.address)
        self.ranges[found.address] = found
        self._by_end[found.end] = found.address
        insort(self._starts, found.address)

    def _take(self, address: int) -> StartSegment | None:
        found = self.ranges.pop(address, None)
        if found is not None:
            if self._by_end.get(found.end) == address:
                del self._by_end[found.end]
            del self._starts[bisect_left(self._starts, address)]
        return found

    def _unmap(self, begin: int, end: int) -> None:
        """Take pages out of the run that holds them."""
        holder = self._holder(begin)
        if holder is None or end > holder.end:
            self.contradictions += 1
            return
        self._take(holder.address)
        for low, high in ((holder.address, begin), (end, holder.end)):
            if low < high:
                self._put(StartSegment(low, high, holder.stream, True, holder.pool))

    def _holder(self, address: int) -> StartSegment | None:
        """The last segment that begins at an address or before."""
        at = bisect_right(self._starts, address) - 1
        return self.ranges[self._starts[at]] if at >= 0 else None

    def _map(self, begin: int, end: int, entry: Entry) -> None:
        """Put pages back, joined with the runs they touch."""
        runs = [self.ranges.get(address) for address in (self._by_end.get(begin, -1), end)]
        pool = entry.pool_id or next((run.pool for run in runs if run), DEFAULT_POOL)
        for run in runs:
            if run and run.expandable and (run.stream, run.pool) == (entry.stream, pool):
                self._take(run.address)
                begin, end = min(begin, run.address), max(end, run.end)
        self._put(StartSegment(begin, end, entry.stream, True, pool))


def _place(blocks: dict[int, StartBlock], ranges: list[StartSegment]) -> int:
    """Put each block into the segment that holds it; returns how many have none."""
    starts = [segment.address for segment in ranges]
    lost = 0
    for _, block in sorted(blocks.items()):
        at = bisect_right(starts, block.address) - 1
        if at < 0 or block.address >= ranges[at].end:
            lost += 1
        else:
            ranges[at].blocks.append(block)
    return lost


def _size_blocks(segment: StartSegment) -> None:
    """Sizes of blocks that are known by their request only: rounded up, and with the tail that
    the allocator did not split off."""
    small = segment.end - segment.address <= _SMALL_SEGMENT
    splits_all = small or segment.expandable
    limits = [*(block.address for block in segment.blocks[1:]), segment.end]
    for block, limit in zip(segment.blocks, limits, strict=False):
        room = limit - block.address
        if not block.bytes:
            block.bytes = max(-(-block.requested // _ALIGNMENT), 1) * _ALIGNMENT
            if not splits_all and 0 < room - block.bytes <= _LARGEST_TAIL:
                block.bytes = room
        block.bytes = min(block.bytes, room)
        block.requested = min(block.requested, block.bytes)
