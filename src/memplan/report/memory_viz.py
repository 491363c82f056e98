"""A trace as the snapshot pickle that PyTorch's memory visualizer opens.

The layout is that of `torch.cuda.memory._snapshot()`: the allocator's history in `device_traces`,
its state after the last event in `segments`. Addresses come from the simulated allocator. The
viewer walks the history backwards from the final state, so both are made from the same walk.

The viewer's own unpickler (`MemoryViz.js`) knows protocols 2 to 4 without sets, bytes and classes.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.report.memory_viz_frames import Frame, FrameWriter
from memplan.report.replayed import replayed
from memplan.simulate import AllocatorSettings, Timeline
from memplan.types.collection import paused_collection
from memplan.types.output_file import write_file
from memplan.types.trace import EventKind, Trace

_PROTOCOL = 4
_POOL = (0, 0)
_SMALL_SEGMENT = 2 << 20
_SEGMENT_ACTIONS = {
    EventKind.SEGMENT_ALLOC: "segment_alloc",
    EventKind.SEGMENT_FREE: "segment_free",
    EventKind.SEGMENT_MAP: "segment_map",
    EventKind.SEGMENT_UNMAP: "segment_unmap",
}
_GIVES_BACK = frozenset({EventKind.SEGMENT_FREE, EventKind.SEGMENT_UNMAP})


def export_memory_viz(
    trace: Trace, path: Path | str, *, device: int = 0, overwrite: bool = False
) -> None:
    """Write a trace of one device as a PyTorch memory snapshot.

    Raises UsageError when `path` exists and `overwrite` is False or cannot be written, and when
    the trace holds nothing of that device; what `simulate` raises for a trace that cannot be.
    """
    with paused_collection():
        content = pickle.dumps(memory_viz_snapshot(trace, device=device), _PROTOCOL)
    write_file(Path(path), [content], overwrite=overwrite)


def memory_viz_snapshot(trace: Trace, *, device: int = 0) -> dict[str, Any]:
    """The snapshot as `torch.cuda.memory._snapshot()` would return it."""
    trace, timeline = replayed(trace, device=device)
    walk = _Walk(trace, timeline)
    walk.run()
    return {
        "segments": list(walk.final_segments()),
        "device_traces": [*([] for _ in range(device)), walk.entries],
        "allocator_settings": _allocator_settings(timeline.settings, trace.meta.alloc_conf),
        "external_annotations": [],
    }


def history(trace: Trace, timeline: Timeline) -> list[dict[str, Any]]:
    """What the simulated allocator did, in order, as entries of PyTorch's `device_traces`;
    `time_us` is the event of the trace."""
    walk = _Walk(trace, timeline)
    walk.run()
    return walk.entries


@dataclass(slots=True)
class _Block:
    """A block in use; sizes in bytes."""

    address: int
    bytes: int
    requested: int
    stream: int
    frames: list[Frame]
    pending: bool = False
    """Released, but another stream may still use it."""


class _Walk:
    """Goes through the events once; writes the history and keeps the state."""

    def __init__(self, trace: Trace, timeline: Timeline) -> None:
        self.trace = trace
        self.timeline = timeline
        self.entries: list[dict[str, Any]] = []
        self._frames = FrameWriter(trace)
        self._blocks: dict[int, _Block] = {}
        self._pending: dict[int, _Block] = {}
        self._nameless: list[_Block] = []
        for segment in trace.meta.initial_segments:
            if segment.device != timeline.device:
                continue
            for block in segment.blocks:
                made = _Block(block.address, block.bytes, block.requested_bytes, segment.stream, [])
                if block.storage >= 0:
                    self._blocks[block.storage] = made
                elif block.storage < -1:
                    self._nameless.append(made)

    def run(self) -> None:
        """Write the history."""
        events, timeline = self.trace.events, self.timeline
        mine = (events.device == timeline.device).tolist()
        kinds, storages = events.kind.tolist(), events.storage.tolist()
        nbytes, streams = events.bytes.tolist(), events.stream.tolist()
        addresses = timeline.address.tolist()
        allocated, active = timeline.allocated.tolist(), timeline.active.tolist()
        segment_events = _by_event(timeline)
        alloc, free, completed = EventKind.ALLOC, EventKind.FREE, EventKind.FREE_COMPLETED
        allocated_before = active_before = timeline.start_allocated_bytes
        for event, kind in enumerate(kinds):
            storage = storages[event]
            let_go = active_before - active[event]
            if mine[event] and kind == alloc and addresses[event] >= 0:
                size = allocated[event] - allocated_before
                block = _Block(addresses[event], size, nbytes[event], streams[event], [])
                self._complete_some(event, let_go + size)
                self._segment_events(event, segment_events)
                self._alloc(event, storage, block)
            elif mine[event] and kind == free:
                self._free(event, storage, let_go)
            elif mine[event] and kind == completed:
                self._complete(event, storage)
            else:
                self._complete_some(event, let_go)
                self._segment_events(event, segment_events)
            allocated_before, active_before = allocated[event], active[event]

    def _alloc(self, event: int, storage: int, block: _Block) -> None:
        self._complete_within(event, block.address, block.bytes)
        block.frames = self._frames.of_event(event)
        self._blocks[storage] = block
        self._entry(event, "alloc", block.address, block.requested, block.stream, block.frames)

    def _free(self, event: int, storage: int, let_go: int) -> None:
        """A release; it is complete unless the simulated allocator let go of less than it."""
        block = self._blocks.get(storage)
        if block is None or block.pending:
            return
        frames = self._frames.of_event(event)
        self._entry(event, "free_requested", block.address, block.requested, block.stream, frames)
        block.pending = True
        self._pending[storage] = block
        if let_go >= block.bytes:
            self._complete(event, storage)

    def _complete(self, event: int, storage: int) -> None:
        block = self._pending.pop(storage, None)
        if block is None:
            return
        del self._blocks[storage]
        self._entry(event, "free_completed", block.address, block.requested, block.stream, [])

    def _complete_some(self, event: int, let_go: int) -> None:
        """Complete the releases, oldest first, that account for the bytes that the simulated
        allocator let go of at an event which released nothing itself."""
        for storage, block in list(self._pending.items()) if let_go > 0 else ():
            if block.bytes <= let_go:
                let_go -= block.bytes
                self._complete(event, storage)

    def _complete_within(self, event: int, address: int, nbytes: int) -> None:
        """Complete the releases whose memory is about to be used for something else."""
        for storage, block in list(self._pending.items()):
            if block.address < address + nbytes and address < block.address + block.bytes:
                self._complete(event, storage)

    def _segment_events(
        self, event: int, by_event: dict[int, list[tuple[EventKind, int, int, int]]]
    ) -> None:
        for kind, address, nbytes, stream in by_event.get(event, ()):
            self._segment_event(event, kind, address, nbytes, stream)

    def _segment_event(
        self, event: int, kind: EventKind, address: int, nbytes: int, stream: int
    ) -> None:
        if kind in _GIVES_BACK:
            self._complete_within(event, address, nbytes)
        frames = self._frames.of_event(event)
        self._entry(event, _SEGMENT_ACTIONS[kind], address, nbytes, stream, frames)

    def _entry(
        self, event: int, action: str, address: int, size: int, stream: int, frames: list[Frame]
    ) -> None:
        self.entries.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": stream,
                "time_us": event,
                "pool_id": _POOL,
                "frames": frames,
            }
        )

    def final_segments(self) -> Iterator[dict[str, Any]]:
        """The segments held after the last event, in order of address, with all their blocks."""
        held = _held_at_end(self.timeline)
        starts = [address for address, _, _ in held]
        inside: list[list[_Block]] = [[] for _ in held]
        blocks = sorted([*self._blocks.values(), *self._nameless], key=lambda b: b.address)
        for block in blocks:
            row = bisect_right(starts, block.address) - 1
            if row >= 0 and block.address < starts[row] + held[row][1]:
                inside[row].append(block)
        for (address, size, stream), contents in zip(held, inside, strict=True):
            yield self._segment(address, size, stream, contents)

    def _segment(
        self, address: int, size: int, stream: int, contents: list[_Block]
    ) -> dict[str, Any]:
        expandable = self.timeline.settings.expandable_segments
        in_use = [block for block in contents if not block.pending]
        return {
            "device": self.timeline.device,
            "address": address,
            "total_size": size,
            "allocated_size": sum(block.bytes for block in in_use),
            "active_size": sum(block.bytes for block in contents),
            "requested_size": sum(block.requested for block in in_use),
            "stream": stream,
            "segment_type": "small" if size <= _SMALL_SEGMENT else "large",
            "segment_pool_id": _POOL,
            "is_expandable": expandable,
            "frames": [],
            "blocks": list(_tiled(address, size, contents)),
        }


def _tiled(address: int, size: int, contents: list[_Block]) -> Iterator[dict[str, Any]]:
    """Blocks in use and the free ones between them; together they are the segment."""
    at = address
    end = address + size
    for index, block in enumerate(contents):
        limit = contents[index + 1].address if index + 1 < len(contents) else end
        if block.address > at:
            yield _block(at, block.address - at, 0, "inactive", [])
        length = min(block.bytes, limit - block.address)
        state = "active_pending_free" if block.pending else "active_allocated"
        yield _block(block.address, length, block.requested, state, block.frames)
        at = block.address + length
    if at < end:
        yield _block(at, end - at, 0, "inactive", [])


def _block(
    address: int, size: int, requested: int, state: str, frames: list[Frame]
) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }


def _by_event(timeline: Timeline) -> dict[int, list[tuple[EventKind, int, int, int]]]:
    """(kind, address, bytes, stream) of what each event asked of the device, in order."""
    log = timeline.segment_events
    found: dict[int, list[tuple[EventKind, int, int, int]]] = {}
    for event, kind, address, nbytes, stream in zip(
        *(c.tolist() for c in (log.event, log.kind, log.address, log.bytes, log.stream)),
        strict=True,
    ):
        if event >= 0:
            found.setdefault(event, []).append((EventKind(kind), address, nbytes, stream))
    return found


def _held_at_end(timeline: Timeline) -> list[tuple[int, int, int]]:
    """(address, bytes, stream) of the segments held to the end; pages of expandable segments that
    touch are one."""
    rows = timeline.segments
    held = sorted(
        (address, nbytes, stream)
        for address, nbytes, stream, freed in zip(
            *(c.tolist() for c in (rows.address, rows.bytes, rows.stream, rows.freed_event)),
            strict=True,
        )
        if freed < 0
    )
    if not timeline.settings.expandable_segments:
        return held
    joined: list[tuple[int, int, int]] = []
    for address, nbytes, stream in held:
        if joined and sum(joined[-1][:2]) == address and joined[-1][2] == stream:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes, stream)
        else:
            joined.append((address, nbytes, stream))
    return joined


def _allocator_settings(settings: AllocatorSettings, conf: str) -> dict[str, Any]:
    unlimited = AllocatorSettings().max_split_size
    return {
        "PYTORCH_CUDA_ALLOC_CONF": conf,
        "max_split_size": -1 if settings.max_split_size >= unlimited else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {
            str(1 << power): count for power, count in enumerate(settings.roundup_power2_divisions)
        },
    }
