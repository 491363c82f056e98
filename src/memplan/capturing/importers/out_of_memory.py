"""The request at which a job ran out of memory, from a snapshot's history.

The entry `oom` is written by `CUDACachingAllocator.cpp` after every free segment was given back and
the device had refused again: `size` is the rounded request, `device_free` what `cudaMemGetInfo`
called free. Its frames are those of the request. A snapshot taken in an observer
(`torch._C._cuda_attach_out_of_memory_observer`) ends there; one dumped by an exception handler or
at exit holds what came after as well, so the state at the failure is found by undoing that.
"""

from __future__ import annotations

from pathlib import Path

from memplan.capturing.importers.frames import FrameReader, PhaseTracker, Place, user_stack
from memplan.capturing.importers.snapshot import snapshot_trace
from memplan.capturing.importers.snapshot_schema import Entry, Snapshot, read_schema
from memplan.capturing.importers.snapshot_start import StartSegment, rewind
from memplan.types.collection import paused_collection
from memplan.types.errors import NoAnswerError
from memplan.types.out_of_memory import FreePiece, HeldBlock, OutOfMemory
from memplan.types.trace import EventKind, Trace

_SMALL_SEGMENT = 2 << 20
_SMALL_REQUEST = 1 << 20
_LEAST_GAP = 512
"""Smaller ones are what a block was not rounded up to."""


def read_out_of_memory(path: Path | str) -> tuple[OutOfMemory, Trace]:
    """The last failed request of a snapshot, and the history as a trace.

    Raises NoAnswerError where no request of the history failed; FormatError and UsageError as
    `read_snapshot`.
    """
    path = Path(path)
    with paused_collection():
        snapshot = read_schema(path)
        device, row = _last_failure(path, snapshot)
        trace = snapshot_trace(path, snapshot)
        failures = [
            index
            for index, kind in enumerate(trace.events.kind.tolist())
            if kind == EventKind.OUT_OF_MEMORY and trace.events.device[index] == device
        ]
        found = _read(path, snapshot, device, row, trace, failures)
    return found, trace


def _last_failure(path: Path, snapshot: Snapshot) -> tuple[int, int]:
    """Device and row of the last `oom` entry."""
    last = [
        (entry.time_us or 0, device, row)
        for device, entries in enumerate(snapshot.device_traces)
        for row, entry in enumerate(entries)
        if entry.action == "oom"
    ]
    if not last:
        raise NoAnswerError(
            f"{path}: no request of its history failed for lack of memory",
            f"`memplan simulate {path}`; or a snapshot dumped after the OutOfMemoryError, with "
            "_record_memory_history() called before the training",
        )
    return max(last)[1:]


def _read(
    path: Path, snapshot: Snapshot, device: int, row: int, trace: Trace, failures: list[int]
) -> OutOfMemory:
    entries = snapshot.device_traces[device]
    failed = entries[row]
    segments = [one for one in snapshot.segments if one.device == device]
    state = rewind(segments, entries[row + 1 :])
    frames = FrameReader(str(path))
    origins, phases = _origins(entries[: row + 1], frames)
    for segment in segments:  # what outlived the history tells its origin itself
        for block in segment.blocks:
            if block.address is not None and block.frames:
                origins.setdefault(block.address, (frames.place(block.frames), "before"))
    place = frames.place(failed.frames)
    held = [
        _held(block.address, block.bytes, block.requested, origins, waits=block.pending)
        for one in state.segments
        for block in one.blocks
    ]
    event = failures[-1]
    return OutOfMemory(
        device=device,
        event=event,
        asked_bytes=failed.size,
        device_free_bytes=failed.device_free,
        stream=failed.stream,
        source=place.source,
        op=place.op,
        phase=phases.phase.name.lower(),
        step=phases.step,
        stack=user_stack(failed.frames),
        reserved_bytes=sum(one.end - one.address for one in state.segments),
        held=held,
        free=[piece for one in state.segments for piece in _gaps(one)],
        failures=len(failures),
    )


_Origins = dict[int, tuple[Place, str]]


def _origins(entries: list[Entry], frames: FrameReader) -> tuple[_Origins, PhaseTracker]:
    """For each address, the place and the phase of the last request that was given it."""
    found: _Origins = {}
    phases = PhaseTracker()
    for entry in entries:
        if entry.action in ("alloc", "oom"):
            place = frames.place(entry.frames)
            phases.allocation(place, has_frames=bool(entry.frames))
            if entry.action == "alloc":
                found[entry.addr] = (place, phases.phase.name.lower())
    return found, phases


def _held(
    address: int, nbytes: int, requested: int, origins: _Origins, *, waits: bool
) -> HeldBlock:
    place, phase = origins.get(address, (Place("", "", None), "before"))
    return HeldBlock(nbytes, requested, place.source, place.op, phase, waits)


def _gaps(segment: StartSegment) -> list[FreePiece]:
    size = segment.end - segment.address
    small = size <= _SMALL_SEGMENT
    if segment.expandable:
        largest = max((block.requested for block in segment.blocks), default=0)
        small = bool(largest) and largest <= _SMALL_REQUEST
    gaps = []
    at = segment.address
    for block in segment.blocks:
        gaps.append(block.address - at)
        at = block.address + block.bytes
    gaps.append(segment.end - at)
    return [FreePiece(gap, segment.stream, small) for gap in gaps if gap >= _LEAST_GAP]
