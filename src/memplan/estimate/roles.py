"""Who is alive when, and what for: lifetimes of storages and the roles that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan.types.trace import I64, U8, EventKind, Phase, Role, Trace

BEFORE = -1
"""`Lifetimes.alloc` of a storage that lived before the first event."""


@dataclass(frozen=True)
class Lifetimes:
    """One row a storage generation: alive on `[alloc, free)` of the event index."""

    alloc: I64
    """Event of the allocation, `BEFORE`, or the trace's length for a storage never seen on the
    device."""
    free: I64
    """Event of the release; the trace's length when it is never released."""
    bytes: I64
    """Requested bytes."""

    def alive_at(self, event: int) -> I64:
        """Storages alive right after `event`, ascending."""
        return np.flatnonzero((self.alloc <= event) & (event < self.free))


def lifetimes(trace: Trace, device: int = 0) -> Lifetimes:
    """Lifetimes of all storages on one device, by the host's release."""
    count, end = len(trace.storages), len(trace)
    alloc = np.full(count, end, np.int64)
    free = np.full(count, end, np.int64)
    nbytes = np.zeros(count, np.int64)
    events = trace.events
    here = (events.device == device) & (events.storage >= 0)
    # A generation is allocated once and released once, so plain assignment is enough.
    rows = np.flatnonzero(here & (events.kind == EventKind.ALLOC))
    alloc[events.storage[rows]] = rows
    nbytes[events.storage[rows]] = events.bytes[rows]
    for segment in trace.meta.initial_segments:
        for block in segment.blocks:
            if segment.device == device and 0 <= block.storage < count:
                alloc[block.storage] = BEFORE
                nbytes[block.storage] = block.requested_bytes
    rows = np.flatnonzero(here & (events.kind == EventKind.FREE))
    free[events.storage[rows]] = rows
    return Lifetimes(alloc, free, nbytes)


def derive_roles(trace: Trace, lives: Lifetimes) -> U8:
    """The role of every storage; none is UNKNOWN.

    A storage of unknown role that is allocated in a forward and still alive when the next backward
    begins was kept for it: an activation. Anything else unknown is a temporary.
    """
    roles = trace.storages.role.copy()
    unknown = roles == Role.UNKNOWN
    roles[unknown] = Role.TEMPORARY
    roles[unknown & _kept_for_backward(trace, lives)] = Role.ACTIVATION
    return roles


def _kept_for_backward(trace: Trace, lives: Lifetimes) -> npt.NDArray[np.bool_]:
    phase, end = trace.events.phase, len(trace)
    backward = np.flatnonzero(phase == Phase.BACKWARD)
    kept = np.zeros(len(lives.alloc), bool)
    rows = np.flatnonzero((lives.alloc >= 0) & (lives.alloc < end))
    rows = rows[phase[lives.alloc[rows]] == Phase.FORWARD]
    position = np.searchsorted(backward, lives.alloc[rows], side="right")
    begins = np.append(backward, end)[position]
    kept[rows] = (begins < end) & (lives.free[rows] > begins)
    return kept
