"""The sequence of requests that a stretch of a trace makes of the allocator, and its fingerprint.

A request is (kind, bytes, stream). What the allocator answers (segments, completed releases) is no
request, and neither is what only moves time (events, synchronisation).
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from memplan.types.trace import I64, EventKind, Trace

REQUESTS = (EventKind.ALLOC, EventKind.FREE, EventKind.RECORD_STREAM, EventKind.EMPTY_CACHE)
_DIGEST_BYTES = 16


def requests(trace: Trace, start: int, stop: int) -> I64:
    """The requests of events `[start, stop)`: an (n, 3) array of kind, bytes, stream."""
    events = trace.events
    rows = np.flatnonzero(np.isin(events.kind[start:stop], REQUESTS)) + start
    columns = (events.kind[rows], events.bytes[rows], events.stream[rows])
    return np.stack([column.astype(np.int64) for column in columns], axis=1)


def request_signature(trace: Trace, start: int, stop: int) -> bytes:
    """Fingerprint (16 bytes) of the requests of events `[start, stop)`."""
    content = np.ascontiguousarray(requests(trace, start, stop))
    return blake2b(content.data, digest_size=_DIGEST_BYTES).digest()


def is_steady(trace: Trace, a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two half-open ranges of events make the same requests in the same order."""
    return np.array_equal(requests(trace, *a), requests(trace, *b))


def first_difference(trace: Trace, a: tuple[int, int], b: tuple[int, int]) -> str:
    """The first request in which two ranges of events differ, in words; empty if in none."""
    left, right = requests(trace, *a), requests(trace, *b)
    shorter = min(len(left), len(right))
    differs = np.any(left[:shorter] != right[:shorter], axis=1)
    at = int(differs.argmax()) if differs.any() else shorter
    if at == len(left) == len(right):
        return ""
    return f"request {at}: {_words(left, at)} against {_words(right, at)}"


def _words(rows: npt.NDArray[np.int64], at: int) -> str:
    if at >= len(rows):
        return "none"
    kind, nbytes, stream = rows[at].tolist()
    words = f"{EventKind(kind).name.lower()} of {nbytes} bytes"
    return f"{words} on stream {stream}" if stream else words
