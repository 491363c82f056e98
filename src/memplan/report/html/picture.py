"""What the page draws of a job: memory over time in levels of detail, and where each block lay.

Levels are computed here, so that the page paints at once whatever the trace's length. A level cuts
the events into buckets of one width; of each bucket it has the event at which the most is asked for
(the first of them), and the state there: no level hides a peak.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan.report.html.columns import pack
from memplan.report.text import short_op
from memplan.simulate import Timeline
from memplan.simulate.roles import CATEGORIES, derive_roles, nameless_bytes, requested_bytes
from memplan.types.trace import I64, EventKind, Phase, Trace

LEVELS = (2_048, 16_384, 131_072)
"""The most buckets of each level."""
MOST_BLOCKS = 120_000
UNIT = 512
NAMES = [*dict.fromkeys(CATEGORIES.values()), "unknown"]
"""Names of the bands, from the bottom up."""
_GROWING = frozenset({"event", "born", "offset", "reserved", *(f"band{i}" for i in range(32))})


@dataclass(frozen=True)
class Blocks:
    """Rectangles of address by time: alive over events `[born, ended)`, at `offset`."""

    storage: I64
    born: I64
    ended: I64
    offset: I64
    bytes: I64
    ground: list[tuple[int, int, int, int]]
    """(from event, to event, offset, bytes) of the memory that the blocks lie in."""
    height: int


class Picture:
    """A replayed trace, as packed tables for the page."""

    def __init__(self, trace: Trace, timeline: Timeline) -> None:
        self.trace = trace
        self.timeline = timeline
        self._bytes = requested_bytes(trace, timeline)
        bands = np.full(max(CATEGORIES) + 1, len(NAMES) - 1, np.int64)
        for role, name in CATEGORIES.items():
            bands[role] = NAMES.index(name)
        self._band = bands[derive_roles(trace, timeline)]
        self._strings: dict[str, int] = {"": 0}
        self._origins, self._origin_of = self._intern_origins()
        self._labels, self._label_of = self._intern_labels()

    def tables(
        self, planned: Blocks | None = None, room_bytes: int | None = None
    ) -> dict[str, str]:
        """Tables by name: `overview` is painted first, `levels` and `blocks` once they are
        unpacked. `room_bytes`: memory that the card of the verdict has for PyTorch."""
        widths = list(dict.fromkeys(max(1, -(-len(self.trace) // count)) for count in LEVELS))
        most = [self._fullest(width) for width in widths]
        levels = self._levels(widths, most)
        blocks = allocator_blocks(self.trace, self.timeline, self._bytes)
        first = {name: column for name, column in levels.items() if name.startswith("0.")}
        later = {name: column for name, column in levels.items() if not name.startswith("0.")}
        overview = {
            "events": len(self.trace),
            "widths": widths,
            "unit": UNIT,
            "bands": NAMES,
            "phases": [phase.name.lower() for phase in Phase],
            "strings": list(self._strings),
            "origins": self._origins,
            "labels": self._labels,
            "peak": self.timeline.fullest_event,
            "room": room_bytes,
        }
        pictures = {"blocks": self._packed(blocks)}
        if planned is not None:
            pictures["planned"] = self._packed(planned)
        return {
            "overview": pack(first, overview, _GROWING),
            "levels": pack(later, {}, _GROWING),
            **pictures,
        }

    def _fullest(self, width: int) -> I64:
        """For each bucket, the event with the most allocated bytes."""
        asked = self.timeline.requested
        count = -(-len(asked) // width)
        padded = np.full(count * width, -1, np.int64)
        padded[: len(asked)] = asked
        rows: I64 = padded.reshape(count, width).argmax(axis=1) + np.arange(count) * width
        return rows

    def _levels(self, widths: list[int], most: list[I64]) -> dict[str, I64]:
        events = self.trace.events
        found: dict[str, I64] = {}
        for level, rows in enumerate(most):
            made = (events.kind[rows] == EventKind.ALLOC) & (events.storage[rows] >= 0)
            label = np.append(self._label_of, 0)[events.storage[rows]]
            table = {
                "event": rows,
                "origin": self._origin_of[rows],
                "label": np.where(made, label, 0),
                "size": np.where(made, events.bytes[rows], 0),
                "phase": events.phase[rows],
                "step": events.step[rows],
                "reserved": self.timeline.reserved[rows] // UNIT,
            }
            found |= {f"{level}.{name}": column.astype(np.int64) for name, column in table.items()}
        for band in range(len(NAMES)):
            held = self._held(band)
            for level, rows in enumerate(most):
                found[f"{level}.band{band}"] = -(-held[rows] // UNIT)
        return found

    def _held(self, band: int) -> I64:
        """Requested bytes of a band after each event."""
        trace, timeline = self.trace, self.timeline
        mine = np.flatnonzero((self._band == band) & (timeline.alloc_event >= -1))
        change = np.zeros(len(trace) + 1, np.int64)
        np.add.at(change, timeline.alloc_event[mine] + 1, self._bytes[mine])
        ended = mine[timeline.free_event[mine] >= 0]
        np.subtract.at(change, timeline.free_event[ended] + 1, self._bytes[ended])
        held = np.cumsum(change)[1:]
        if band == len(NAMES) - 1:
            held = held + nameless_bytes(trace, timeline.device)
        return held

    def _intern_origins(self) -> tuple[list[list[int]], I64]:
        """Distinct (operator, module, line), as numbers of strings; and by event which one."""
        trace, events = self.trace, self.trace.events
        keys = np.zeros((len(trace), 3), np.int64)
        caused = events.op >= 0
        keys[caused, 0] = trace.ops.name[events.op[caused]]
        keys[:, 1], keys[:, 2] = events.module, events.source
        rows, of = _distinct(keys)
        strings = trace.strings
        return [
            [
                self._string(short_op(strings[op])),
                self._string(strings[m]),
                self._string(strings[s]),
            ]
            for op, m, s in rows.tolist()
        ], of

    def _intern_labels(self) -> tuple[list[list[int]], I64]:
        """Distinct (name, shape, dtype) of storages; number 0 is nothing."""
        table = self.trace.storages
        rows, of = _distinct(np.stack((table.name, table.shape, table.dtype), 1).astype(np.int64))
        strings = self.trace.strings
        labels = [[self._string(strings[part]) for part in row] for row in rows.tolist()]
        return [[0, 0, 0], *labels], of + 1

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _packed(self, blocks: Blocks) -> str:
        """The blocks that cover the most of the picture, in the order of their allocation."""
        area = blocks.bytes * (blocks.ended - blocks.born)
        kept = np.arange(len(area))
        if len(area) > MOST_BLOCKS:
            kept = np.sort(np.argpartition(-area, MOST_BLOCKS)[:MOST_BLOCKS])
        storage, born = blocks.storage[kept], blocks.born[kept]
        sizes, size = np.unique(blocks.bytes[kept], return_inverse=True)
        made = np.where(born >= 0, self._origin_of[np.maximum(born, 0)], -1)
        columns = {
            "born": born,
            "life": blocks.ended[kept] - born,
            "offset": blocks.offset[kept] // UNIT,
            "size": size.reshape(-1),
            "band": self._band[storage],
            "label": self._label_of[storage],
            "origin": made,
            "stream": np.where(born >= 0, self.trace.events.stream[np.maximum(born, 0)], 0),
        }
        more = {
            "sizes": sizes.tolist(),
            "ground": blocks.ground,
            "height": blocks.height,
            "left_out": len(area) - len(kept),
        }
        return pack(columns, more, _GROWING)


def allocator_blocks(trace: Trace, timeline: Timeline, nbytes: I64) -> Blocks:
    """The replayed allocator's addresses of storages, without those it never reserved."""
    address = np.full(len(trace.storages), -1, np.int64)
    for segment in trace.meta.initial_segments:
        for block in segment.blocks:
            if segment.device == timeline.device and block.storage >= 0:
                address[block.storage] = block.address
    seen = np.flatnonzero(timeline.alloc_event >= 0)
    address[seen] = timeline.address[timeline.alloc_event[seen]]
    rows = np.flatnonzero((address >= 0) & (nbytes > 0))
    segments = timeline.segments
    starts, offsets, height = _compact(segments.address, segments.bytes)
    end = len(trace)

    def place(where: I64) -> I64:
        at = np.searchsorted(starts, where, side="right") - 1
        return offsets[at] + where - starts[at]

    freed = np.where(timeline.free_event < 0, end, timeline.free_event)
    given_back = np.where(segments.freed_event < 0, end, segments.freed_event)
    ground = zip(
        np.maximum(segments.event, 0).tolist(),
        given_back.tolist(),
        place(segments.address).tolist() if len(starts) else [],
        segments.bytes.tolist(),
        strict=True,
    )
    return Blocks(
        storage=rows,
        born=timeline.alloc_event[rows],
        ended=freed[rows],
        offset=place(address[rows]) if len(starts) else address[rows],
        bytes=nbytes[rows],
        ground=list(ground),
        height=height,
    )


def _compact(address: I64, nbytes: I64) -> tuple[I64, I64, int]:
    """Ranges of addresses that were ever reserved, joined where they touch: their starts, their
    offsets when laid end to end, and their sum."""
    order = np.argsort(address, kind="stable")
    first, last = address[order], np.maximum.accumulate((address + nbytes)[order])
    if not len(first):
        return first, first, 0
    begins = np.concatenate(([True], first[1:] > last[:-1]))
    starts = first[begins]
    ends = last[np.append(np.flatnonzero(begins)[1:] - 1, len(last) - 1)]
    lengths = ends - starts
    return starts, np.cumsum(lengths) - lengths, int(lengths.sum())


def _distinct(keys: npt.NDArray[np.int64]) -> tuple[I64, I64]:
    """Distinct rows, and by row which of them; columns hold numbers below 2^21 each, as indices of
    strings do, or are told apart the slow way."""
    if not len(keys):
        return keys, np.zeros(0, np.int64)
    if int(keys.max()) < 1 << 21:
        joined = keys[:, 0] << 42 | keys[:, 1] << 21 | keys[:, 2]
        _, first, of = np.unique(joined, return_index=True, return_inverse=True)
        return keys[first], of.reshape(-1)
    rows, of = np.unique(keys, axis=0, return_inverse=True)
    return rows, of.reshape(-1)
