"""What each storage is for, and how many bytes it asked for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memplan.simulate.timeline import Timeline
from memplan.types.trace import I64, U8, EventKind, Phase, Role, Trace

CATEGORIES = {
    Role.PARAMETER: "parameters",
    Role.GRADIENT: "gradients",
    Role.OPTIMIZER_STATE: "optimizer_state",
    Role.ACTIVATION: "activations",
    Role.TEMPORARY: "temporaries",
    Role.INPUT: "inputs",
    Role.WORKSPACE: "workspaces",
    Role.COMMUNICATION: "communication",
    Role.GATHERED_PARAMETER: "temporaries",
    Role.ENGINE: "engine",
}
"""What a breakdown counts a role as."""


def requested_bytes(trace: Trace, timeline: Timeline) -> I64:
    """Requested bytes by storage generation; 0 for those that never live on the device.

    They are what the replay granted: on a full card a kernel makes do with a smaller workspace
    than the trace asks for, or with none.
    """
    nbytes = np.zeros(len(trace.storages), np.int64)
    for segment in trace.meta.initial_segments:
        for block in segment.blocks:
            if segment.device == timeline.device and 0 <= block.storage < len(nbytes):
                nbytes[block.storage] = block.requested_bytes
    events = trace.events
    granted = np.diff(timeline.requested, prepend=timeline.start_requested_bytes)
    # A generation begins once, so plain assignment is enough.
    rows = np.flatnonzero(
        (events.kind == EventKind.ALLOC)
        & (events.device == timeline.device)
        & (events.storage >= 0)
    )
    nbytes[events.storage[rows]] = granted[rows]
    return nbytes


def derive_roles(trace: Trace, timeline: Timeline) -> U8:
    """The role of every storage; none is UNKNOWN.

    A storage of unknown role that is allocated in a forward and still alive when the next backward
    begins was kept for it: an activation. Code that calls no module has no forward: there, what
    lives through the beginning of exactly one backward. Anything else unknown is a temporary.
    """
    roles = trace.storages.role.copy()
    unknown = roles == Role.UNKNOWN
    roles[unknown] = Role.TEMPORARY
    roles[unknown & _kept_for_backward(trace, timeline)] = Role.ACTIVATION
    return roles


def _kept_for_backward(trace: Trace, timeline: Timeline) -> npt.NDArray[np.bool_]:
    phase, end = trace.events.phase, len(trace)
    born = timeline.alloc_event
    freed = np.where(timeline.free_event < 0, end, timeline.free_event)
    rows = np.flatnonzero(born >= 0)
    backward = phase == Phase.BACKWARD
    begins = np.flatnonzero(backward & ~np.append(False, backward[:-1]))
    lived_through = np.searchsorted(begins, freed[rows]) - np.searchsorted(begins, born[rows])
    of = phase[born[rows]]
    kept = np.zeros(len(born), bool)
    kept[rows] = np.where(
        of == Phase.FORWARD,
        lived_through > 0,
        np.isin(of, (Phase.SETUP, Phase.OTHER)) & (lived_through == 1) & (freed[rows] < end),
    )
    return kept


def paths_below_roots(trace: Trace) -> dict[str, str]:
    """`Model.blocks.0` by `blocks.0`: parameters are named from their root module on, modules from
    its class."""
    paths = [trace.strings[module] for module in np.unique(trace.events.module).tolist()]
    return {path.partition(".")[2]: path for path in reversed(paths) if path}


def nameless_bytes(trace: Trace, device: int) -> int:
    """Held from before the first event to the end, by nobody that the trace names."""
    return sum(
        block.requested_bytes
        for segment in trace.meta.initial_segments
        for block in segment.blocks
        if segment.device == device and block.storage < -1
    )
