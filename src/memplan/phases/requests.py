"""The sequence of requests that a stretch of a trace makes of the allocator, and its fingerprint.

A request is (kind, bytes, stream). What the allocator answers (segments, completed releases) is no
request, and neither is what only moves time (events, synchronisation).
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from memplan.types.trace import EventKind, Trace

REQUESTS = (EventKind.ALLOC, EventKind.FREE, EventKind.RECORD_STREAM, EventKind.EMPTY_CACHE)
_DIGEST_BYTES = 16


def request_signature(trace: Trace, start: int, stop: int) -> bytes:
    """Fingerprint (16 bytes) of the requests of events `[start, stop)`."""
    events = trace.events
    rows = np.flatnonzero(np.isin(events.kind[start:stop], REQUESTS)) + start
    columns = (events.kind[rows], events.bytes[rows], events.stream[rows])
    content = np.stack([column.astype(np.int64) for column in columns], axis=1)
    return blake2b(content.data, digest_size=_DIGEST_BYTES).digest()
