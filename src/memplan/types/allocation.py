"""The allocation part of a plan: where each request of a job goes.

Requests are rows, in the order in which the job makes them: first the setup, up to the steady
step, then a round, which repeats. A row is alive over `[lower, upper)` on the plan's clock: the
setup takes `[0, start)`, the first round `[start, start + clock)`. What of a round ends later
lives on into the next one, where its row begins no earlier than it ends; what of the setup ends
with the first round stays for ever. Sizes and offsets are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from memplan.types.errors import FormatError
from memplan.types.plan import AllocationPart, Space
from memplan.types.trace import I64

COLUMNS = ("bytes", "stream", "phase", "lower", "upper", "offset", "space")
MAX_REQUESTS = 4_000_000
_MAX_SPACES = 1 << 16
_MAX_BYTES = 1 << 48
_MAX_CLOCK = 1 << 40
_LEVEL = 3
ROUNDING = 512
"""A request takes a multiple of this, as in PyTorch's own allocator."""


@dataclass(frozen=True)
class Requests:
    """The columns of an `AllocationPart`, one row a request."""

    bytes: I64
    stream: I64
    phase: I64
    lower: I64
    upper: I64
    offset: I64
    space: I64

    def __len__(self) -> int:
        return len(self.bytes)


def rounded(nbytes: I64) -> I64:
    """What requests take: the next multiple of `ROUNDING`."""
    return -(-nbytes // ROUNDING) * ROUNDING


def pack_requests(requests: Requests) -> dict[str, bytes]:
    """The columns as a plan holds them."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    return {
        name: compressor.compress(np.ascontiguousarray(getattr(requests, name), "<i8").tobytes())
        for name in COLUMNS
    }


def read_requests(part: AllocationPart) -> Requests:
    """The columns of a part. Raises FormatError when they are damaged or of another length."""
    if not 0 <= part.requests <= MAX_REQUESTS:
        raise FormatError(f"its allocation part claims {part.requests} requests")
    if sorted(part.columns) != sorted(COLUMNS):
        raise FormatError(
            f"its allocation part has columns {', '.join(sorted(part.columns))[:200]}"
        )
    size = 8 * part.requests
    columns = {}
    for name, packed in part.columns.items():
        try:
            if zstandard.frame_content_size(packed) != size:
                raise FormatError(f"column {name} does not hold {part.requests} numbers")
            content = zstandard.ZstdDecompressor().decompress(
                packed, max_output_size=size, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise FormatError(f"column {name} is damaged: {error}") from error
        if len(content) != size:
            raise FormatError(f"column {name} does not hold {part.requests} numbers")
        columns[name] = np.frombuffer(content, "<i8").astype(np.int64)
    return Requests(**columns)


def native_columns(part: AllocationPart, requests: Requests) -> dict[str, I64]:
    """A plan as native code takes it: its requests and its spaces."""
    edges = [edge for space in part.spaces for pair in space.ranges for edge in pair]
    columns = {
        **{name: getattr(requests, name) for name in COLUMNS},
        "space_lower": [space.lower for space in part.spaces],
        "space_upper": [space.upper for space in part.spaces],
        "space_ranges": np.cumsum([0, *(len(space.ranges) for space in part.spaces)]),
        "ranges": edges,
    }
    return {name: np.ascontiguousarray(values, np.int64) for name, values in columns.items()}


def check_allocation(part: AllocationPart) -> None:
    """Raise FormatError, with the reason, unless the part could be a plan: every number in range,
    and no two planned requests that are alive at once on the same bytes."""
    sane = 0 < part.clock < _MAX_CLOCK and 0 <= part.start < _MAX_CLOCK
    sane = sane and 0 < part.steps < 1 << 20 and 0 <= part.device < 1 << 15
    if not sane or not 0 <= part.setup < part.requests:
        raise FormatError("its allocation part has a clock, steps or device out of range")
    if len(part.spaces) > _MAX_SPACES:
        raise FormatError(f"its allocation part has {len(part.spaces)} spaces")
    if not 0 <= part.load_bytes <= part.arena_bytes < _MAX_BYTES:
        raise FormatError("its allocation part has a height below its load, or out of range")
    requests = read_requests(part)
    limits = {
        "bytes": (0, _MAX_BYTES),
        "stream": (0, 1 << 31),
        "phase": (-1, len(part.phases)),
        "lower": (0, part.start + part.clock),
        "upper": (1, part.start + 2 * part.clock + 1),
        "offset": (-1, part.arena_bytes + 1),
        "space": (-1, len(part.spaces)),
    }
    for name, (low, high) in limits.items():
        column = getattr(requests, name)
        faulty = (column < low) | (column >= high)
        if faulty.any():
            row = int(faulty.argmax())
            raise FormatError(f"{name} of request {row} is {column[row]}, outside [{low}, {high})")
    _check_lifetimes(part, requests)
    first, later = _in_rounds(part, requests)
    size = rounded(requests.bytes)
    for placed in (first, later):
        _check_places(part, requests, size, placed)
    for number, space in enumerate(part.spaces):
        try:
            _check_space(part, space, requests.offset, size, (first, later))
        except FormatError as error:
            raise FormatError(
                f"the space of module {space.module[:80]!r} {error.message}"
            ) from None
        rows = np.flatnonzero(requests.space == number)
        outside = (requests.lower[rows] < space.lower) | (requests.upper[rows] > space.upper)
        if outside.any():
            row = int(rows[outside.argmax()])
            raise FormatError(f"request {row} outlives the window of its space")


def _check_lifetimes(part: AllocationPart, requests: Requests) -> None:
    end = part.start + part.clock
    before = np.arange(part.requests) < part.setup
    lower, upper = requests.lower, requests.upper
    _refuse(lower >= upper, "lives for no time")
    _refuse(before & (upper > end), "is of the setup and outlives the first round")
    strays = ~before & ((lower < part.start) | (upper - lower > part.clock))
    _refuse(strays, "is of the round and begins before it, or lives longer")
    planned = requests.offset >= 0
    size = rounded(requests.bytes)
    misplaced = planned & (requests.offset % ROUNDING != 0)
    misplaced |= planned & (requests.offset + size > part.arena_bytes)
    _refuse(misplaced, "is placed across the arena's end, or unaligned")
    _refuse(planned & (requests.space >= 0), "has both a place and a space")


class _Placed(NamedTuple):
    """Planned rows, and when each is alive; a row that crosses into the next round is two."""

    rows: I64
    opens: I64
    closes: I64


def _in_rounds(part: AllocationPart, requests: Requests) -> tuple[_Placed, _Placed]:
    """The setup and the first round; then what stays and any later round, which begins with the
    ends of the round before."""
    end = part.start + part.clock
    lower, upper = requests.lower, requests.upper
    planned = requests.offset >= 0
    before = np.arange(part.requests) < part.setup
    stays = np.flatnonzero(planned & before & (upper == end))
    again = np.flatnonzero(planned & (upper > end))
    of_round = np.flatnonzero(planned & ~before)
    first = np.flatnonzero(planned)
    begin = np.full(len(stays), part.start), lower[of_round], np.full(len(again), part.start)
    ends = upper[stays], np.minimum(upper[of_round], end), upper[again] - part.clock
    return (
        _Placed(first, lower[first], np.minimum(upper[first], end)),
        _Placed(
            np.concatenate((stays, of_round, again)), np.concatenate(begin), np.concatenate(ends)
        ),
    )


def _check_places(part: AllocationPart, requests: Requests, size: I64, placed: _Placed) -> None:
    rows, opens, closes = placed
    pair = find_overlap(opens, closes, requests.offset[rows], size[rows])
    if pair is not None:
        which = f"{rows[pair[0]]} and {rows[pair[1]]}"
        raise FormatError(f"requests {which} are given the same bytes")
    order = np.argsort(np.concatenate((closes, opens)), kind="stable")
    load = np.cumsum(np.concatenate((-size[rows], size[rows]))[order])
    if load.max(initial=0) > part.load_bytes:
        raise FormatError(f"its planned requests are {load.max()} bytes at once, above its load")


def _check_space(
    part: AllocationPart, space: Space, offset: I64, size: I64, rounds: tuple[_Placed, _Placed]
) -> None:
    """Raise FormatError with what is wrong with a space, to be said after its name."""
    end = part.start + part.clock
    if not 0 <= space.lower < space.upper <= end + part.clock or space.lower >= end:
        raise FormatError(f"has the window [{space.lower}, {space.upper})")
    edges = [0, *(edge for pair in space.ranges for edge in pair), part.arena_bytes]
    if any(a > b for a, b in pairwise(edges)):
        raise FormatError("is no part of the arena")
    windows = [(rounds[0], space.lower, space.upper)]
    if space.lower >= part.start:
        # The window in a later round, and what of it goes on into the one after.
        windows.append((rounds[1], space.lower, space.upper))
        windows.append((rounds[1], part.start, space.upper - part.clock))
    opening, closing = np.array(edges[1::2]), np.array(edges[2::2])
    for (rows, opens, closes), lower, upper in windows:
        used = rows[(opens < upper) & (lower < closes) & (size[rows] > 0)]
        # The ranges that end at or below the start of a place, and those that begin below its end.
        ended = np.searchsorted(closing, offset[used], side="right")
        begun = np.searchsorted(opening, offset[used] + size[used])
        if (begun > ended).any():
            raise FormatError(f"holds planned request {int(used[(begun > ended).argmax()])}")


def _refuse(faulty: npt.NDArray[np.bool_], what: str) -> None:
    if faulty.any():
        raise FormatError(f"request {int(faulty.argmax())} {what}")


def find_overlap(lower: I64, upper: I64, offset: I64, size: I64) -> tuple[int, int] | None:
    """Two rows that are alive at once and share bytes; None when there are none.

    One sweep over the ends of lifetimes `[lower, upper)`, with what is alive sorted by offset.
    """
    present = np.flatnonzero(size > 0)
    present = present[np.argsort(offset[present], kind="stable")]
    count = len(present)
    times = np.concatenate((upper[present], lower[present]))
    # At one moment, what ends is gone before what begins: the ends come first among equals.
    order = np.argsort(times, kind="stable").tolist()
    starts = offset[present].tolist()
    ends = (offset[present] + size[present]).tolist()
    alive = RankSet(count)
    for event in order:
        row = event % count
        if event < count:
            alive.remove(row)
            continue
        below, above = alive.neighbours(row)
        for other in (above, below):
            if other >= 0 and starts[other] < ends[row] and ends[other] > starts[row]:
                return int(present[other]), int(present[row])
        alive.add(row)
    return None


_BITS = 10
_LOW = (1 << _BITS) - 1
_BIT = [1 << bit for bit in range(1 << _BITS)]


class RankSet:
    """Some of the numbers below `count`; the neighbours of one are known in a time that hardly
    grows. As bits: words of 1,024, and in each higher level a bit for every word below that
    holds any."""

    def __init__(self, count: int) -> None:
        self._levels: list[list[int]] = []
        while True:
            count = (count >> _BITS) + 1
            self._levels.append([0] * count)
            if count == 1:
                break

    def add(self, number: int) -> None:
        for words in self._levels:
            word = number >> _BITS
            words[word] |= _BIT[number & _LOW]
            number = word

    def remove(self, number: int) -> None:
        """It must be there."""
        for words in self._levels:
            word = number >> _BITS
            words[word] ^= _BIT[number & _LOW]
            if words[word]:
                return
            number = word

    def neighbours(self, number: int) -> tuple[int, int]:
        """The greatest member below a number and the least one above; -1 where there is none."""
        below, above = -1, -1
        for level, words in enumerate(self._levels):
            word, bit = number >> _BITS, number & _LOW
            if below < 0 and (lower := words[word] & (_BIT[bit] - 1)):
                below = self._descend((word << _BITS) + lower.bit_length() - 1, level, last=True)
            if above < 0 and (higher := words[word] >> bit >> 1):
                first = bit + (higher & -higher).bit_length()
                above = self._descend((word << _BITS) + first, level, last=False)
            if below >= 0 and above >= 0:
                break
            number = word
        return below, above

    def _descend(self, number: int, level: int, *, last: bool) -> int:
        """The last or first member below a bit of a level."""
        for words in reversed(self._levels[:level]):
            word = words[number]
            bit = word.bit_length() if last else (word & -word).bit_length()
            number = (number << _BITS) + bit - 1
        return number
