"""Checks what a plan served, by a rule that shares no code with the planned allocator's."""

from __future__ import annotations

import numpy as np

from memplan.layout.serve import Served
from memplan.layout.streams import lifetimes
from memplan.types.allocation import ROUNDING, find_overlap, rounded
from memplan.types.plan import AllocationPart
from memplan.types.trace import EventKind, Trace


def check_served(trace: Trace, part: AllocationPart, served: Served) -> str:
    """What is wrong with it; empty when every place lies in the arena and no two requests that are
    alive at once share a byte."""
    events = trace.events
    asked = np.flatnonzero((events.kind == EventKind.ALLOC) & (events.bytes > 0))
    asked = asked[served.offset[events.storage[asked]] >= 0]
    storage, size = events.storage[asked], rounded(events.bytes[asked])
    offset = served.offset[storage]
    outside = (offset % ROUNDING != 0) | (offset + size > part.arena_bytes)
    if outside.any():
        return f"storage {int(storage[outside.argmax()])} does not lie in the arena"
    pair = find_overlap(asked, lifetimes(trace, part.device).end[storage], offset, size)
    if pair is not None:
        return f"storages {int(storage[pair[0]])} and {int(storage[pair[1]])} share bytes"
    return ""
