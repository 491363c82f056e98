"""Memory from before the first event, as the rows that the replay takes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memplan.simulate.settings import MIB, AllocatorSettings
from memplan.types.errors import FormatError
from memplan.types.trace import I64, Block, Segment, Trace

FREE = -1
"""`Block.storage` of memory that is cached."""
UNNAMED = -2
"""`Block.storage` of memory in use by something that no event names."""

_SMALL_REQUEST = MIB
_SMALL_SEGMENT = 2 * MIB


def initial_rows(trace: Trace, settings: AllocatorSettings, device: int) -> tuple[I64, I64]:
    """Flattened rows of segments (address, bytes, stream, small, expandable) and of their blocks
    (segment row, bytes, requested bytes, in use, storage or -1) for `memplan._native.replay`.

    Raises:
        FormatError: blocks that overlap, leave their segment or name storages that do not exist.
    """
    segments: list[int] = []
    blocks: list[int] = []
    owned = [s for s in trace.meta.initial_segments if s.device == device]
    for row, segment in enumerate(owned):
        if segment.bytes <= 0 or segment.address < 0 or segment.bytes > 1 << 50:
            raise FormatError(f"initial segment {row}: {segment.bytes} bytes at {segment.address}")
        small = is_small(segment, settings)
        segments += (segment.address, segment.bytes, segment.stream, small, segment.expandable)
        for block in filled(segment):
            if block.storage >= len(trace.storages):
                raise FormatError(f"initial segment {row}: storage {block.storage} is unknown")
            in_use = block.storage != FREE
            storage = block.storage if block.storage >= 0 else -1
            blocks += (row, block.bytes, block.requested_bytes if in_use else 0, in_use, storage)
    return np.array(segments, dtype=np.int64), np.array(blocks, dtype=np.int64)


def is_small(segment: Segment, settings: AllocatorSettings) -> bool:
    """Whether a segment belongs to the pool of requests of up to 1 MiB.

    Segments of the small pool have 2 MiB, all others at least 10. Expandable ones are told by
    their pages and by what lives in them; one that could be either counts as large.
    """
    if not segment.expandable:
        return segment.bytes <= _SMALL_SEGMENT
    if segment.bytes % settings.large_segment_size:
        return True
    sizes = [block.bytes for block in segment.blocks if block.storage != FREE]
    return bool(sizes) and max(sizes) <= _SMALL_REQUEST


def filled(segment: Segment) -> Iterator[Block]:
    """The blocks in order of address, with gaps and neighbouring free blocks as one free block."""
    end = segment.address
    free_from = end
    for block in sorted(segment.blocks, key=lambda block: block.address):
        if block.address < end or block.bytes <= 0:
            raise FormatError(f"initial block at {block.address} overlaps its neighbour")
        end = block.address + block.bytes
        if block.storage == FREE:
            continue
        if block.address > free_from:
            yield Block(free_from, block.address - free_from, 0, FREE)
        yield block
        free_from = end
    if end > segment.address + segment.bytes:
        raise FormatError(f"initial block at {end} lies outside its segment")
    if free_from < segment.address + segment.bytes:
        yield Block(free_from, segment.address + segment.bytes - free_from, 0, FREE)
