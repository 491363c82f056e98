"""PyTorch memory snapshots (`torch.cuda.memory._dump_snapshot`) as a `Trace`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import merge
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from memplan.capturing.importers.event_csv import GIVEN_BACK, OBSERVED
from memplan.capturing.importers.frames import FrameReader, PhaseTracker
from memplan.capturing.importers.snapshot_schema import (
    DEFAULT_POOL,
    Entry,
    Pool,
    Snapshot,
    read_schema,
)
from memplan.capturing.importers.snapshot_start import StartState, rewind
from memplan.types.builder import TraceBuilder, printable
from memplan.types.collection import paused_collection
from memplan.types.errors import FormatError
from memplan.types.trace import (
    PRIVATE_POOLS,
    Block,
    EventKind,
    Provenance,
    Segment,
    Trace,
    TraceMeta,
)
from memplan.types.trace_check import check_trace

_IGNORED = frozenset({"snapshot", "user_defined", "workspace_snapshot", "annotate"})
_SETTINGS_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def read_snapshot(path: Path | str) -> Trace:
    """The trace that a snapshot's history tells, of all its devices.

    What was held before the history began is in `meta.initial_segments`. Streams, which are
    pointers in the file, become numbers in order of appearance, 0 staying 0; what a private pool
    has of a stream becomes one from `PRIVATE_POOLS` on. Source lines, operators, phases and steps
    come from the stack frames as far as these were recorded.

    Some events are put in by rule, and have that provenance: `EMPTY_CACHE` where memory
    goes back to the device, for the history does not say what made the process do so; `FREE` at
    the start of blocks that already awaited another stream; `FREE_COMPLETED` at the end of those
    that still do; both where the history lost them.

    Raises FormatError when the file is no snapshot with a history, or contradicts itself;
    UsageError when it cannot be read.
    """
    path = Path(path)
    with paused_collection():
        return snapshot_trace(path, read_schema(path))


def snapshot_trace(path: Path, snapshot: Snapshot) -> Trace:
    """What `read_snapshot` makes of a file that was read; `path` is for messages."""
    importer = _Importer(str(path))
    for device, entries in enumerate(snapshot.device_traces):
        held = [segment for segment in snapshot.segments if segment.device == device]
        if entries or held:
            importer.start(device, rewind(held, entries))
    for device, entry in _in_order(snapshot):
        importer.entry(device, entry)
    trace = importer.trace(_alloc_conf(snapshot.allocator_settings))
    check_trace(trace, str(path))
    return trace


def _in_order(snapshot: Snapshot) -> Iterator[tuple[int, Entry]]:
    """Entries of all devices by their time; a device's own order is kept in any case."""

    def timed(device: int, entries: list[Entry]) -> Iterator[tuple[int, int, Entry]]:
        times = accumulate((entry.time_us or 0 for entry in entries), max)
        return ((time, device, entry) for time, entry in zip(times, entries, strict=True))

    streams = (timed(device, entries) for device, entries in enumerate(snapshot.device_traces))
    for _, device, entry in merge(*streams, key=lambda item: item[:2]):
        yield device, entry


class _Release(NamedTuple):
    """A storage that the program released, and that another stream may still use."""

    storage: int
    bytes: int
    stream: int


class _Importer:
    """Entries in, events out; knows which storage holds which address of which device."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._builder = TraceBuilder()
        self._frames = FrameReader(path)
        self._phases = PhaseTracker()
        self._streams: dict[int, int] = {0: 0}
        self._pools: dict[tuple[Pool, int], int] = {}
        self._held: dict[tuple[int, int], int] = {}
        self._released: dict[tuple[int, int], _Release] = {}
        self._segments: list[Segment] = []
        self._giving_back: set[int] = set()
        self._contradictions = 0
        self._unknown: Counter[str] = Counter()
        self._bytes_before = 0

    def start(self, device: int, state: StartState) -> None:
        """Take over what a device held before its history."""
        self._contradictions += state.contradictions
        reached = 0
        for segment in state.segments:
            if segment.address < reached:
                raise FormatError(
                    f"{self._path}: segments overlap at {segment.address:#x} of device {device}",
                    "take the snapshot again; this one contradicts itself",
                )
            reached = segment.end
            stream = self._stream(segment.stream, segment.pool)
            blocks = []
            at = segment.address
            for block in segment.blocks:
                if at < block.address:
                    blocks.append(Block(at, block.address - at, 0, -1))
                storage = self._builder.new_storage()
                blocks.append(Block(block.address, block.bytes, block.requested, storage))
                at = block.address + block.bytes
                self._held[device, block.address] = storage
                self._bytes_before += block.requested
                if block.pending:
                    self._free(device, block.address, block.requested, stream, Provenance.RULE)
            if at < segment.end:
                blocks.append(Block(at, segment.end - at, 0, -1))
            size = segment.end - segment.address
            self._segments.append(
                Segment(segment.address, size, stream, device, blocks, segment.expandable)
            )

    def entry(self, device: int, entry: Entry) -> None:
        """Append what one entry tells."""
        action = entry.action
        stream = self._stream(entry.stream, entry.pool_id or DEFAULT_POOL)
        self._note_giving_back(device, action in GIVEN_BACK, stream)
        if action == "alloc":
            self._alloc(device, entry, stream)
        elif action in ("free_requested", "free"):
            self._free(device, entry.addr, entry.size, stream)
        elif action == "free_completed":
            self._free_completed(device, entry, stream)
        elif action in OBSERVED:
            self._builder.append(
                OBSERVED[action], -1, entry.size, stream=stream, device=device, aux=entry.addr
            )
        elif action not in _IGNORED:
            self._unknown[action[:40]] += 1

    def _note_giving_back(self, device: int, gives_back: bool, stream: int) -> None:
        if gives_back and device not in self._giving_back:
            self._builder.append(
                EventKind.EMPTY_CACHE, stream=stream, device=device, provenance=Provenance.RULE
            )
        if gives_back:
            self._giving_back.add(device)
        else:
            self._giving_back.discard(device)

    def _alloc(self, device: int, entry: Entry, stream: int) -> None:
        builder = self._builder
        place = self._frames.place(entry.frames)
        self._phases.allocation(place, has_frames=bool(entry.frames))
        builder.phase, builder.step = self._phases.phase, self._phases.step
        builder.source = builder.intern(place.source)
        key = device, entry.addr
        if key in self._held or key in self._released:
            self._fill_hole(device, entry.addr, entry.size, stream)
        storage = self._held[key] = builder.new_storage(name=entry.user_metadata or "")
        if place.op:
            builder.begin_op(place.op, stream=stream)
            builder.op_writes([storage])
        builder.append(
            EventKind.ALLOC, storage, entry.size, stream=stream, device=device, aux=entry.addr
        )
        builder.op = -1
        builder.source = 0

    def _fill_hole(self, device: int, address: int, nbytes: int, stream: int) -> None:
        """End what is at an address that is handed out again: its end is missing."""
        self._contradictions += 1
        if (device, address) in self._held:
            self._free(device, address, nbytes, stream, Provenance.RULE)
        storage, kept, stream = self._released.pop((device, address))
        kind = EventKind.FREE_COMPLETED
        self._ended(kind, storage, device, address, kept, stream, Provenance.RULE)

    def _free(
        self,
        device: int,
        address: int,
        nbytes: int,
        stream: int,
        provenance: Provenance = Provenance.OBSERVED,
    ) -> None:
        storage = self._take(self._held, device, address)
        self._released[device, address] = _Release(storage, nbytes, stream)
        self._ended(EventKind.FREE, storage, device, address, nbytes, stream, provenance)

    def _free_completed(self, device: int, entry: Entry, stream: int) -> None:
        release = self._released.pop((device, entry.addr), None)
        storage = release.storage if release else self._take(self._held, device, entry.addr)
        self._ended(EventKind.FREE_COMPLETED, storage, device, entry.addr, entry.size, stream)

    def _ended(
        self,
        kind: EventKind,
        storage: int,
        device: int,
        address: int,
        nbytes: int,
        stream: int,
        provenance: Provenance = Provenance.OBSERVED,
    ) -> None:
        self._builder.append(
            kind,
            storage,
            nbytes,
            stream=stream,
            device=device,
            provenance=provenance,
            aux=address,
        )

    def _take(self, holders: dict[tuple[int, int], int], device: int, address: int) -> int:
        storage = holders.pop((device, address), None)
        return self._builder.new_storage() if storage is None else storage

    def _stream(self, value: int, pool: Pool) -> int:
        if pool != DEFAULT_POOL:
            return self._pools.setdefault((pool, value), PRIVATE_POOLS + len(self._pools))
        return self._streams.setdefault(value, len(self._streams))

    def trace(self, alloc_conf: str) -> Trace:
        """What was appended, with the notes that a reader of its figures needs."""
        for (device, address), (storage, nbytes, stream) in self._released.items():
            kind = EventKind.FREE_COMPLETED
            self._ended(kind, storage, device, address, nbytes, stream, Provenance.RULE)
        notes = []
        if self._bytes_before:
            notes.append(
                f"the history began while {self._bytes_before} bytes were in use; "
                "who asked for them is not known"
            )
        if self._contradictions:
            notes.append(
                f"{self._contradictions} entries of the history contradict the snapshot's final "
                "state: recording was probably switched off for a while"
            )
        for action, count in sorted(self._unknown.items()):
            notes.append(f"{count} entries of the unknown kind {action!r} were left out")
        return self._builder.build(
            TraceMeta(
                origin="snapshot",
                method="observed",
                alloc_conf=alloc_conf,
                optimizer_steps=self._phases.step,
                initial_segments=self._segments,
                notes=notes,
            )
        )


def _alloc_conf(settings: dict[str, Any]) -> str:
    """Allocator settings as `PYTORCH_ALLOC_CONF` would state them: the text that was in force, or
    one made from the values where PyTorch kept none."""
    for name in _SETTINGS_NAMES:
        text = settings.get(name)
        if isinstance(text, str) and text.strip():
            return printable(text.strip())
    parts = []
    if settings.get("expandable_segments") is True:
        parts.append("expandable_segments:True")
    split = settings.get("max_split_size")
    if isinstance(split, int) and 0 < split < 1 << 62:
        parts.append(f"max_split_size_mb:{split >> 20}")
    threshold = settings.get("garbage_collection_threshold")
    if isinstance(threshold, float) and 0 < threshold < 1:
        parts.append(f"garbage_collection_threshold:{threshold}")
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, dict) and any(divisions.values()):
        pairs = ",".join(f"{size}:{count}" for size, count in divisions.items())
        parts.append(f"roundup_power2_divisions:[{pairs}]")
    return ",".join(parts)
