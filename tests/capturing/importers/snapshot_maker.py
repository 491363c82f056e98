"""A small caching allocator that keeps its history as `torch.cuda.memory._snapshot()` reports it.

It follows the rules that matter to a reader of snapshots (best fit, splitting, merging, streams,
releases that wait, expandable segments, a ring buffer of entries) and shares no code with memplan.
Key order and types are those of PyTorch's binding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

MIB = 1 << 20
SMALL, LARGE = 2 * MIB, 20 * MIB
BASE = 0x7F00_0000_0000


@dataclass
class MadeBlock:
    address: int
    size: int
    requested: int = 0
    state: str = "inactive"
    frames: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class MadeSegment:
    address: int
    size: int
    stream: int
    small: bool
    blocks: list[MadeBlock]
    expandable: bool = False


class Maker:
    """One device. `stream` arguments are pointers, as in PyTorch; 0 is the default stream."""

    def __init__(
        self,
        device: int = 0,
        *,
        expandable: bool = False,
        capacity: int | None = None,
        private: int | None = None,
    ) -> None:
        self.device = device
        self.private = private
        """A stream that stands for the default one's part of a private pool."""
        self.capacity = capacity
        self.expandable = expandable
        self.segments: list[MadeSegment] = []
        self.entries: list[dict[str, Any]] = []
        self.states: list[list[MadeSegment]] = []
        """The state before each entry."""
        self.reserved: list[int] = []
        """Bytes of segments after each entry."""
        self.clock = 1_700_000_000_000_000
        self._next = BASE + (device << 40)
        self._state = self._copy()

    def malloc(
        self,
        nbytes: int,
        stream: int = 0,
        frames: list[dict[str, Any]] | None = None,
        note: str = "",
    ) -> int:
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MIB
        try:
            block, segment = self._find(size, stream, small) or self._grow(size, stream, small)
        except MemoryError:
            self._log("oom", self.device_free(), size, stream, frames)
            raise
        rest = block.size - size
        if rest >= 512 if small or self.expandable else rest > MIB:
            tail = MadeBlock(block.address + size, rest)
            segment.blocks.insert(segment.blocks.index(block) + 1, tail)
            block.size = size
        block.requested, block.state, block.frames = nbytes, "active_allocated", frames or []
        self._log("alloc", block.address, nbytes, stream, frames, note)
        return block.address

    def free(self, address: int, *, wait: bool = False) -> None:
        """Release; with `wait`, until `complete` another stream holds the block up."""
        block, segment = self._at(address)
        block.state = "active_pending_free"
        self._log("free_requested", address, block.requested, segment.stream)
        if not wait:
            self.complete(address)

    def complete(self, address: int) -> None:
        block, segment = self._at(address)
        nbytes, block.requested, block.state = block.requested, 0, "inactive"
        self._merge(segment)
        self._log("free_completed", address, nbytes, segment.stream)

    def waiting(self) -> list[int]:
        blocks = [block for segment in self.segments for block in segment.blocks]
        return [block.address for block in blocks if block.state == "active_pending_free"]

    def empty_cache(self) -> None:
        for address in self.waiting():
            self.complete(address)
        for segment in list(self.segments):
            if segment.stream == self.private:
                continue
            if self.expandable:
                self._unmap(segment)
            elif all(block.state == "inactive" for block in segment.blocks):
                self.segments.remove(segment)
                self._log("segment_free", segment.address, segment.size, segment.stream)

    def device_free(self) -> int:
        """What `cudaMemGetInfo` would call free."""
        assert self.capacity is not None
        return self.capacity - sum(segment.size for segment in self.segments)

    def _full(self, more: int) -> bool:
        return self.capacity is not None and self.device_free() < more

    def live(self) -> list[int]:
        blocks = [block for segment in self.segments for block in segment.blocks]
        return [block.address for block in blocks if block.state == "active_allocated"]

    def snapshot(self, max_entries: int | None = None) -> dict[str, Any]:
        """What `_snapshot()` returns, with the last `max_entries` entries of the history."""
        kept = self.entries if max_entries is None else self.entries[-max_entries:]
        traces: list[list[dict[str, Any]]] = [[] for _ in range(self.device)]
        return {
            "segments": [self._segment(segment) for segment in self._sorted()],
            "device_traces": [*traces, [dict(entry) for entry in kept]],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if self.expandable else "",
                "max_split_size": -1,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": self.expandable,
                "pinned_num_register_threads": 1,
                "release_lock_on_cudamalloc": False,
                "pinned_use_cuda_host_register": False,
                "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
                "graph_capture_record_stream_reuse": False,
            },
            "external_annotations": [],
        }

    def _segment(self, segment: MadeSegment) -> dict[str, Any]:
        used = [b for b in segment.blocks if b.state == "active_allocated"]
        active = [b for b in segment.blocks if b.state != "inactive"]
        return {
            "device": self.device,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": sum(b.size for b in used),
            "active_size": sum(b.size for b in active),
            "requested_size": sum(b.requested for b in used),
            "stream": self._shown(segment.stream)[0],
            "segment_type": "small" if segment.small else "large",
            "segment_pool_id": self._shown(segment.stream)[1],
            "is_expandable": segment.expandable,
            "frames": [],
            "blocks": [
                {
                    "address": b.address,
                    "size": b.size,
                    "requested_size": b.requested,
                    "state": b.state,
                    "frames": b.frames,
                }
                for b in segment.blocks
            ],
        }

    def _shown(self, stream: int) -> tuple[int, tuple[int, int]]:
        return (0, (0, 1)) if stream == self.private else (stream, (0, 0))

    def _sorted(self) -> list[MadeSegment]:
        return sorted(self.segments, key=lambda segment: segment.address)

    def _copy(self) -> list[MadeSegment]:
        return [replace(s, blocks=[replace(b) for b in s.blocks]) for s in self._sorted()]

    def _log(
        self,
        action: str,
        address: int,
        size: int,
        stream: int,
        frames: list[dict[str, Any]] | None = None,
        note: str = "",
    ) -> None:
        self.clock += 7
        place = "device_free" if action == "oom" else "addr"
        shown, pool = self._shown(stream)
        entry = {"action": action, place: address, "size": size, "stream": shown}
        entry |= {"time_us": self.clock, "compile_context": "N/A", "user_metadata": note}
        self.entries.append(entry | {"pool_id": pool, "frames": frames or []})
        self.states.append(self._state)
        self._state = self._copy()
        self.reserved.append(sum(segment.size for segment in self.segments))

    def _at(self, address: int) -> tuple[MadeBlock, MadeSegment]:
        return next(
            (block, segment)
            for segment in self.segments
            for block in segment.blocks
            if block.address == address
        )

    def _find(self, size: int, stream: int, small: bool) -> tuple[MadeBlock, MadeSegment] | None:
        fitting = [
            (block.size, block.address, block, segment)
            for segment in self.segments
            if segment.stream == stream and segment.small == small
            for block in segment.blocks
            if block.state == "inactive" and block.size >= size
        ]
        return min(fitting, key=lambda item: item[:2])[2:] if fitting else None

    def _grow(self, size: int, stream: int, small: bool) -> tuple[MadeBlock, MadeSegment]:
        if self.expandable:
            return self._map(size, stream, small)
        taken = SMALL if small else LARGE if size < 10 * MIB else -(-size // SMALL) * SMALL
        if self._full(taken):
            self.empty_cache()  # as PyTorch does before it gives up
            if self._full(taken):
                raise MemoryError
        block = MadeBlock(self._next, taken)
        segment = MadeSegment(self._next, taken, stream, small, [block])
        self._next += taken + 64 * MIB
        self.segments.append(segment)
        self._log("segment_alloc", segment.address, taken, stream)
        return block, segment

    def _map(self, size: int, stream: int, small: bool) -> tuple[MadeBlock, MadeSegment]:
        """Map pages at the end of the range of this stream and pool, after a free tail if any."""
        page = SMALL if small else LARGE
        lane = BASE + (1 << 38) * (1 + 2 * [0, *STREAMS].index(stream) + small)
        runs = [s for s in self._sorted() if s.stream == stream and s.small == small]
        segment = runs[-1] if runs else MadeSegment(lane, 0, stream, small, [], True)
        last = segment.blocks[-1] if segment.blocks else None
        have = last.size if last and last.state == "inactive" else 0
        begin, mapped = segment.address + segment.size, -(-(size - have) // page) * page
        if not runs:
            self.segments.append(segment)
        if last is None or not have:
            last = MadeBlock(begin, 0)
            segment.blocks.append(last)
        last.size += mapped
        segment.size += mapped
        self._log("segment_map", begin, mapped, stream)
        return last, segment

    def _unmap(self, segment: MadeSegment) -> None:
        """Give back the whole pages of the free block at the end of a run."""
        page = SMALL if segment.small else LARGE
        last = segment.blocks[-1]
        pages = last.size // page * page if last.state == "inactive" else 0
        if not pages:
            return
        last.size -= pages
        segment.size -= pages
        if not last.size:
            segment.blocks.pop()
        if not segment.size:
            self.segments.remove(segment)
        self._log("segment_unmap", segment.address + segment.size, pages, segment.stream)

    def _merge(self, segment: MadeSegment) -> None:
        merged: list[MadeBlock] = []
        for block in segment.blocks:
            if merged and block.state == merged[-1].state == "inactive":
                merged[-1].size += block.size
            else:
                merged.append(block)
        segment.blocks = merged


STREAMS = [94_000_000_000_001, 94_000_000_000_777]
"""Pointers of two side streams."""
