"""A slow, plain model of the caching allocator's blocks and segments: every search is a scan.

After PyTorch's `c10/cuda/CUDACachingAllocator.cpp` of torch 2.11 to 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memplan.simulate.rounding import block_size
from memplan.simulate.settings import MIB, UNLIMITED, AllocatorSettings
from memplan.types.trace import OUTSIDE, PRIVATE_POOLS, EventKind

_TOP = 1 << 46
_CHUNK = 32 * MIB


@dataclass(eq=False)
class OracleBlock:
    address: int
    size: int
    state: str = "cached"
    """`used`, `pending` (freed, awaited), `cached` or `unmapped`."""
    requested: int = 0
    cached_at: int = 0
    """Searches of its pool when it was cached."""
    uses: list[int] = field(default_factory=list)


@dataclass(eq=False)
class OracleSegment:
    address: int
    size: int
    stream: int
    small: bool
    page: int
    """Page size of an expandable segment; 0 for others."""
    blocks: list[OracleBlock]
    """In order of address, without holes."""


@dataclass
class OracleResult:
    """As the columns of `Timeline`."""

    requested: list[int] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    address: list[int] = field(default_factory=list)
    segment_events: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """(event, kind, bytes, stream, address)."""
    num_alloc_retries: int = 0
    oom_event: int | None = None
    oom_bytes: int = 0


class _RejectedError(Exception):
    """Out of memory without a retry."""


class Oracle:
    """The allocator of one device, without private pools and without observed addresses."""

    def __init__(
        self, settings: AllocatorSettings, capacity: int | None, device_bytes: int | None
    ) -> None:
        self.settings = settings
        self.capacity = UNLIMITED if capacity is None else capacity
        total = device_bytes or capacity
        self.allowed: int | None = None
        if settings.per_process_memory_fraction < 1.0:
            assert total is not None
            self.allowed = int(settings.per_process_memory_fraction * float(total))
        self.reservation = 1 << 40 if total is None else total + total // 8
        self.segments: list[OracleSegment] = []
        self.searches = {True: 0, False: 0}
        self.reserved = 0
        self.event = 0
        self.result = OracleResult()
        self.lowest = _TOP
        self.chunk = (0, 0)

    # Blocks

    def cached(self, stream: int, small: bool) -> list[tuple[OracleBlock, OracleSegment]]:
        """Cached blocks of a stream and pool, best fit first."""
        found = [
            (block, segment)
            for segment in self.segments
            if segment.stream == stream and segment.small == small
            for block in segment.blocks
            if block.state == "cached"
        ]
        return sorted(found, key=lambda pair: (pair[0].size, pair[0].address))

    def settle(self, segment: OracleSegment) -> None:
        """Join neighbours that are both cached or both unmapped; the joined count as new."""
        joined: list[OracleBlock] = []
        for block in segment.blocks:
            if joined and joined[-1].state == block.state and block.state in ("cached", "unmapped"):
                joined[-1].size += block.size
                joined[-1].cached_at = self.searches[segment.small]
            else:
                joined.append(block)
        segment.blocks = joined

    def replace(self, segment: OracleSegment, block: OracleBlock, parts: list[OracleBlock]) -> None:
        at = segment.blocks.index(block)
        segment.blocks[at : at + 1] = [part for part in parts if part.size]

    def place(self, size: int) -> int:
        """The address model: below everything before, from the top again when that runs out."""
        while True:
            address = self.next_place(size)
            if all(
                address + size <= held.address or held.address + held.size <= address
                for held in self.segments
            ):
                return address

    def next_place(self, size: int) -> int:
        """Chunks of 32 MiB downwards, the rest of the last one upwards."""
        start, left = self.chunk
        if size <= left:
            self.chunk = (start + size, left - size)
            return start
        chunk = -(-size // _CHUNK) * _CHUNK
        if chunk >= self.lowest:
            self.lowest = _TOP
        self.lowest -= chunk
        self.chunk = (self.lowest + size, chunk - size)
        return self.lowest

    def log(self, kind: EventKind, segment: OracleSegment, address: int, size: int) -> None:
        self.reserved += size if kind in (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_MAP) else -size
        self.result.segment_events.append((self.event, int(kind), size, segment.stream, address))

    # Requests

    def malloc(self, nbytes: int, stream: int) -> OracleBlock | None:
        """A used block, or None when memory is out."""
        if stream >= OUTSIDE:
            return self.pages_of_others(nbytes, stream)
        size = block_size(nbytes, self.settings)
        small = size <= MIB
        try:
            found = self.search(size, stream, small) or self.obtain(size, stream, small)
        except _RejectedError:
            return None
        if found is None:
            return None
        block, segment = found
        rest = block.size - size
        if small or self.settings.expandable_segments:
            split = rest >= 512
        else:
            split = size < self.settings.max_split_size and rest > MIB
        used = OracleBlock(block.address, size if split else block.size, "used", nbytes)
        tail = OracleBlock(used.address + used.size, block.size - used.size)
        tail.cached_at = self.searches[small]
        self.replace(segment, block, [used, tail])
        return used

    def pages_of_others(self, nbytes: int, stream: int) -> OracleBlock | None:
        """Pages that are not the allocator's: it gives nothing back for them."""
        size = -(-nbytes // (2 * MIB)) * 2 * MIB
        if self.reserved + size > self.capacity:
            return None
        block = OracleBlock(self.place(size), size, "used", nbytes)
        segment = OracleSegment(block.address, size, stream, False, 0, [block])
        self.segments.append(segment)
        self.log(EventKind.SEGMENT_ALLOC, segment, block.address, size)
        return block

    def own(self) -> int:
        """Reserved by the allocator itself."""
        return self.reserved - sum(s.size for s in self.segments if s.stream >= OUTSIDE)

    def search(
        self, size: int, stream: int, small: bool
    ) -> tuple[OracleBlock, OracleSegment] | None:
        settings = self.settings
        if self.allowed is not None and settings.garbage_collection_threshold > 0:
            self.searches[small] += 1
        fits = [pair for pair in self.cached(stream, small) if pair[0].size >= size]
        if not fits:
            return None
        if fits[0][1].page and settings.expandable_segments:
            at = 0
            while (
                fits[at][1].page
                and at + 1 < len(fits)
                and self.room(*fits[at + 1]) < self.room(*fits[at])
            ):
                at += 1
            chosen = fits[at]
        elif fits[0][1].page:
            fixed = [pair for pair in fits if not pair[1].page]
            if not fixed:
                return None
            chosen = fixed[0]
        else:
            chosen = fits[0]
        limit = settings.max_split_size
        if size < limit <= chosen[0].size:
            return None
        if size >= limit and chosen[0].size >= size + settings.max_non_split_rounding:
            return None
        return chosen

    @staticmethod
    def room(block: OracleBlock, segment: OracleSegment) -> int:
        """Size with the unmapped pages behind it."""
        after = segment.blocks[segment.blocks.index(block) + 1 :][:1]
        return block.size + sum(b.size for b in after if b.state == "unmapped")

    def obtain(
        self, size: int, stream: int, small: bool
    ) -> tuple[OracleBlock, OracleSegment] | None:
        """Memory from the device, with all that is tried when it has none."""
        if self.allowed is not None and self.settings.garbage_collection_threshold > 0:
            self.collect_garbage()
        found = self.ask(size, stream, small)
        if found is None and self.give_back_oversize(size, stream, small):
            found = self.ask(size, stream, small)
        if found is None:
            self.empty_cache()
            self.result.num_alloc_retries += 1
            found = self.ask(size, stream, small)
        return found

    def ask(self, size: int, stream: int, small: bool) -> tuple[OracleBlock, OracleSegment] | None:
        usual = 2 * MIB if small else self.settings.large_segment_size
        wanted = usual if small or size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.allowed is not None and self.own() + wanted > self.allowed:
            if self.settings.throw_on_cudamalloc_oom:
                raise _RejectedError
            return None
        if self.settings.expandable_segments:
            return self.expand(size, stream, small, usual)
        if self.reserved + wanted > self.capacity:
            return None
        address = self.place(wanted)
        block = OracleBlock(address, wanted)
        segment = OracleSegment(address, wanted, stream, small, 0, [block])
        self.segments.append(segment)
        self.log(EventKind.SEGMENT_ALLOC, segment, address, wanted)
        return block, segment

    def expand(
        self, size: int, stream: int, small: bool, page: int
    ) -> tuple[OracleBlock, OracleSegment] | None:
        """Map pages at the lowest address where cached and unmapped blocks make enough room."""
        segment, at = self.expandable_place(size, stream, small, page)
        first = segment.blocks[at]
        have = first.size if first.state == "cached" else 0
        while have < size:
            gap = next(
                b for b in segment.blocks if b.address >= first.address and b.state == "unmapped"
            )
            end = gap.address + min(gap.size, size - have)
            end = segment.address + -(-(end - segment.address) // page) * page
            mapped = min(end - gap.address, gap.size)
            if self.reserved + mapped > self.capacity:
                return None
            self.log(EventKind.SEGMENT_MAP, segment, gap.address, mapped)
            fresh = OracleBlock(gap.address, mapped, cached_at=self.searches[small])
            rest = OracleBlock(gap.address + mapped, gap.size - mapped, "unmapped")
            self.replace(segment, gap, [fresh, rest])
            self.settle(segment)
            first = next(
                b for b in segment.blocks if b.address <= first.address < b.address + b.size
            )
            have = first.size
        return first, segment

    def expandable_place(
        self, size: int, stream: int, small: bool, page: int
    ) -> tuple[OracleSegment, int]:
        own = [s for s in self.segments if s.page and s.stream == stream and s.small == small]
        for segment in sorted(own, key=lambda s: s.address):
            for i, block in enumerate(segment.blocks):
                if block.state != "unmapped":
                    continue
                begin = i - 1 if i and segment.blocks[i - 1].state == "cached" else i
                room = 0
                for later in segment.blocks[begin:]:
                    if later.state not in ("cached", "unmapped"):
                        break
                    room += later.size
                if room >= size:
                    return segment, begin
        total = -(-max(self.reservation, size) // page) * page
        address = self.place(total)
        segment = OracleSegment(
            address, total, stream, small, page, [OracleBlock(address, total, "unmapped")]
        )
        self.segments.append(segment)
        return segment, 0

    # Giving back

    def complete_free(self, block: OracleBlock) -> None:
        segment = next(s for s in self.segments if block in s.blocks)
        block.state = "cached"
        block.requested = 0
        block.cached_at = self.searches[segment.small]
        self.settle(segment)
        if segment.stream >= OUTSIDE:
            self.drop(segment)

    def drop(self, segment: OracleSegment) -> None:
        self.segments.remove(segment)
        self.log(EventKind.SEGMENT_FREE, segment, segment.address, segment.size)

    def streams(self) -> list[int]:
        """Those whose cached memory may be given back: a private pool keeps its own."""
        return sorted({s.stream for s in self.segments if s.stream < PRIVATE_POOLS})

    def release_all(self) -> None:
        """Every whole segment and page that is cached."""
        for small in (False, True):
            pool = [pair for stream in self.streams() for pair in self.cached(stream, small)]
            for block, segment in pool:
                if not segment.page and block.size == segment.size:
                    self.drop(segment)
            for block, segment in pool:
                if segment.page:
                    self.unmap(block, segment)

    def unmap(self, block: OracleBlock, segment: OracleSegment) -> None:
        page, offset = segment.page, block.address - segment.address
        begin = -(-offset // page) * page
        end = (offset + block.size) // page * page
        if begin >= end:
            return
        self.log(EventKind.SEGMENT_UNMAP, segment, segment.address + begin, end - begin)
        now = self.searches[segment.small]
        parts = [
            OracleBlock(block.address, begin - offset, cached_at=now),
            OracleBlock(segment.address + begin, end - begin, "unmapped"),
            OracleBlock(segment.address + end, offset + block.size - end, cached_at=now),
        ]
        self.replace(segment, block, parts)
        self.settle(segment)
        if len(segment.blocks) == 1 and segment.blocks[0].state == "unmapped":
            self.segments.remove(segment)

    def empty_cache(self) -> None:
        self.wait_for_all()
        self.release_all()

    def wait_for_all(self) -> None:
        """Replaced by the replay, which knows what is awaited."""

    def give_back_oversize(self, size: int, stream: int, small: bool) -> bool:
        limit = self.settings.max_split_size
        if limit == UNLIMITED:
            return False
        wanted = max(size, limit)
        cached = self.cached(stream, small)
        larger = [pair for pair in cached if pair[0].size >= wanted]
        if larger and not larger[0][1].page:
            self.drop(larger[0][1])
            return True
        released = 0
        for block, segment in reversed([pair for pair in cached if pair not in larger]):
            if released >= wanted or block.size < limit:
                break
            if not segment.page:
                released += block.size
                self.drop(segment)
        return released >= wanted

    def collect_garbage(self) -> None:
        assert self.allowed is not None
        threshold = int(self.settings.garbage_collection_threshold * float(self.allowed))
        target = self.own() - threshold
        if target <= 0:
            return
        whole = [
            (block, segment)
            for stream in self.streams()
            for block, segment in self.cached(stream, False)
            if block.size == segment.size
        ]

        def age(block: OracleBlock) -> int:
            return self.searches[False] - block.cached_at

        reclaimed = 0
        while reclaimed < target and whole:
            mean = sum(age(block) for block, _ in whole) / len(whole)
            old = [pair for pair in whole if age(pair[0]) >= mean]
            # The mean is that of before the sweep.
            for pair in old:
                reclaimed += pair[0].size
                whole.remove(pair)
                self.drop(pair[1])
            if not old:
                break
