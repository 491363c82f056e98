"""Memory that a process held before its allocator log began, inferred from the log.

A block handed out at an address that no segment of the log covers came from memory held before;
so did a block released that the log never saw handed out. From these, by the allocator's rules:

- What was handed out there was cached at the start, unless the log shows its release first.
- Segments begin and end on multiples of 2 MiB. One of the small pool has 2 MiB, and one of the
  large pool that holds only blocks of less than 10 MiB has the size that all such have, 20 MiB by
  default.
- Only heads of cached blocks are handed out, so a segment's end is used last: what follows the
  highest block known in a segment was cached.
- Blocks of the large pool exceed 1 MiB, and it does not split off less: a hole of at most 1 MiB
  between two known blocks is the unsplit tail of the lower one.
- Everything else in between was in use by something that the log does not name.

More that was cached but never handed out cannot be seen. Segments that the process gave back are
taken as the log states them. No `SEGMENT_ALLOC` is read ahead of the event at hand.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from memplan.simulate.initial import FREE, UNNAMED
from memplan.simulate.rounding import block_size
from memplan.simulate.settings import MIB, AllocatorSettings
from memplan.types.trace import Block, EventKind, Segment, Trace

_GRANULARITY = 2 * MIB
_SMALL_REQUEST = MIB
_OWN_SEGMENT = 10 * MIB
"""Requests from this size on get a segment of their own size."""


@dataclass(frozen=True, order=True)
class _Piece:
    """`[begin, end)` of memory from before the log, cached or in use by `storage`."""

    begin: int
    end: int
    storage: int = FREE
    requested: int = 0
    largest: int = 0
    """Largest single block known in it."""


@dataclass
class _Evidence:
    """What the log shows of memory from before it, by stream and pool (small or not)."""

    handed_out: dict[tuple[int, bool], list[_Piece]]
    in_use: dict[tuple[int, bool], list[_Piece]]
    given_back: list[_Piece]


def infer_start(
    trace: Trace, settings: AllocatorSettings | None = None, *, device: int = 0
) -> list[Segment]:
    """Segments that the process held before the first event, in order of address.

    Blocks in use by something unnamed carry the storage -2.
    """
    settings = settings or AllocatorSettings.parse(trace.meta.alloc_conf)
    evidence = _gather(trace, settings, device)
    segments: list[Segment] = []
    for (stream, small), handed_out in sorted(evidence.handed_out.items()):
        in_use = _disjoint(sorted(evidence.in_use[stream, small]))
        pieces = sorted(in_use + _minus(_union(handed_out), in_use))
        usual = _GRANULARITY if small else settings.large_segment_size
        for group in _group(pieces, small, usual):
            base, end, blocks = _segment(group, small, usual, evidence.given_back)
            segments.append(
                Segment(base, end - base, stream, device, blocks, settings.expandable_segments)
            )
    return _apart(sorted(segments, key=lambda segment: segment.address))


def _gather(trace: Trace, settings: AllocatorSettings, device: int) -> _Evidence:
    events = trace.events
    seen: list[tuple[int, int]] = []  # Segments that the log allocated, by address.
    begun: set[int] = set()
    found = _Evidence(defaultdict(list), defaultdict(list), [])
    columns = (events.kind, events.device, events.storage, events.bytes, events.stream, events.aux)
    for kind, where, storage, nbytes, stream, address in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        if where != device or address < 0:
            continue
        if kind in (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_MAP):
            insort(seen, (address, address + nbytes))
        elif kind == EventKind.SEGMENT_FREE:
            if _covered(seen, address):
                seen.remove((address, address + nbytes))
            else:
                found.given_back.append(_Piece(address, address + nbytes))
        elif kind in (EventKind.ALLOC, EventKind.FREE, EventKind.FREE_COMPLETED) and nbytes:
            is_alloc = kind == EventKind.ALLOC
            known = storage in begun
            begun.add(storage)
            if (known and not is_alloc) or _covered(seen, address):
                continue
            size = block_size(nbytes, settings)
            key = (stream, size <= _SMALL_REQUEST)
            if is_alloc:
                found.handed_out[key].append(_Piece(address, address + size, largest=size))
            else:
                piece = _Piece(address, address + size, storage, nbytes, size)
                found.in_use[key].append(piece)
                found.handed_out[key]  # So that the key exists.
    return found


def _covered(segments: list[tuple[int, int]], address: int) -> bool:
    at = bisect_right(segments, (address, 1 << 63)) - 1
    return at >= 0 and segments[at][0] <= address < segments[at][1]


def _union(pieces: list[_Piece]) -> list[_Piece]:
    """Overlapping or touching ranges as one; free ones only."""
    joined: list[_Piece] = []
    for piece in sorted(pieces):
        if joined and piece.begin <= joined[-1].end:
            end = max(joined[-1].end, piece.end)
            largest = max(joined[-1].largest, piece.largest)
            joined[-1] = _Piece(joined[-1].begin, end, largest=largest)
        else:
            joined.append(piece)
    return joined


def _disjoint(pieces: list[_Piece]) -> list[_Piece]:
    """Drops pieces that overlap an earlier one: the same place in use twice is not the start."""
    kept: list[_Piece] = []
    for piece in pieces:
        if not kept or piece.begin >= kept[-1].end:
            kept.append(piece)
    return kept


def _minus(free: list[_Piece], in_use: list[_Piece]) -> list[_Piece]:
    """What is left of free ranges without those in use; both sorted and disjoint."""
    left: list[_Piece] = []
    at = 0
    for piece in free:
        begin = piece.begin
        while at < len(in_use) and in_use[at].end <= begin:
            at += 1
        i = at
        while i < len(in_use) and in_use[i].begin < piece.end:
            if begin < in_use[i].begin:
                left.append(_Piece(begin, in_use[i].begin, largest=piece.largest))
            begin = max(begin, in_use[i].end)
            i += 1
        if begin < piece.end:
            left.append(_Piece(begin, piece.end, largest=piece.largest))
    return left


def _group(pieces: list[_Piece], small: bool, usual: int) -> list[list[_Piece]]:
    """Pieces of one segment each: those that share 2 MiB, or lie within a segment of usual size."""
    groups: list[list[_Piece]] = []
    for whole in pieces:
        for piece in _by_page(whole) if small else [whole]:
            if groups and (
                piece.begin < _up(groups[-1][-1].end)
                or (
                    piece.end <= _down(groups[-1][0].begin) + usual
                    and _is_usual([*groups[-1], piece])
                )
            ):
                groups[-1].append(piece)
            else:
                groups.append([piece])
    return groups


def _is_usual(pieces: list[_Piece]) -> bool:
    """Whether a segment with these need not have been made for one of them alone."""
    return max(piece.largest for piece in pieces) < _OWN_SEGMENT


def _down(address: int) -> int:
    return address // _GRANULARITY * _GRANULARITY


def _up(address: int) -> int:
    return -(-address // _GRANULARITY) * _GRANULARITY


def _by_page(piece: _Piece) -> list[_Piece]:
    """A free range cut at 2 MiB: neighbouring segments of the small pool are still two."""
    if piece.storage != FREE:
        return [piece]
    cuts = range(_down(piece.begin) + _GRANULARITY, piece.end, _GRANULARITY)
    edges = [piece.begin, *cuts, piece.end]
    return [_Piece(a, b, largest=piece.largest) for a, b in pairwise(edges)]


def _segment(
    pieces: list[_Piece], small: bool, usual: int, given_back: list[_Piece]
) -> tuple[int, int, list[Block]]:
    """Base, end and blocks of the segment that holds these pieces."""
    base = _down(pieces[0].begin)
    end = _up(pieces[-1].end)
    if _is_usual(pieces):
        end = max(end, base + usual)
    for segment in given_back:
        if segment.begin <= pieces[0].begin and pieces[-1].end <= segment.end:
            base, end = segment.begin, segment.end
    blocks: list[Block] = []
    last = base
    for i, piece in enumerate(pieces):
        hole = piece.begin - last
        if hole and not small and i and hole <= _SMALL_REQUEST:
            below = blocks.pop()
            blocks.append(
                Block(below.address, below.bytes + hole, below.requested_bytes, below.storage)
            )
        elif hole:
            blocks.append(Block(last, hole, hole, UNNAMED))
        blocks.append(Block(piece.begin, piece.end - piece.begin, piece.requested, piece.storage))
        last = piece.end
    if last < end:
        blocks.append(Block(last, end - last, 0, FREE))
    return base, end, blocks


def _apart(segments: list[Segment]) -> list[Segment]:
    """Shortens the cached end of a segment that reaches into the next one; drops the next one
    where that is not enough, as in a log that contradicts itself."""
    kept: list[Segment] = []
    for segment in segments:
        if kept:
            kept[-1] = _shortened(kept[-1], segment.address)
            if segment.address < kept[-1].address + kept[-1].bytes:
                continue
        kept.append(segment)
    return kept


def _shortened(segment: Segment, limit: int) -> Segment:
    *blocks, last = segment.blocks
    if segment.address + segment.bytes <= limit or last.storage != FREE or last.address > limit:
        return segment
    if last.address < limit:
        blocks.append(Block(last.address, limit - last.address, 0, FREE))
    if not blocks:
        return segment
    return msgspec.structs.replace(segment, bytes=limit - segment.address, blocks=blocks)
