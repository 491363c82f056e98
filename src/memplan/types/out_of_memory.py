"""A job that died of `OutOfMemoryError`: what a snapshot shows of it, and what follows from that.

All sizes are bytes of one process on one device. docs/out-of-memory.md describes the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memplan.types.estimate import GpuInfo

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class HeldBlock:
    """A block in use when the request failed."""

    bytes: int
    """Bytes of the block: `requested`, rounded up, with a rest that is too small to split off."""
    requested: int
    source: str
    """`file:line` that asked for it; empty where unknown."""
    op: str
    phase: str
    """`setup`, `forward`, …; `before` where the history begins later, or empty where unknown."""
    waits: bool
    """Released by the program, still awaiting another stream."""


@dataclass(frozen=True)
class FreePiece:
    """A gap in a segment when the request failed."""

    bytes: int
    stream: int
    small: bool
    """Whether the segment is for requests of up to 1 MiB."""


@dataclass(frozen=True)
class OutOfMemory:
    """The last request of a history that failed, and the allocator's state then."""

    device: int
    event: int
    """Index of the event in the imported trace."""
    asked_bytes: int
    """Rounded up to 512, as the allocator logs it."""
    device_free_bytes: int | None
    """What the device had left, by `cudaMemGetInfo`."""
    stream: int
    source: str
    op: str
    phase: str
    step: int
    stack: list[str]
    """`file:line function` outside PyTorch and installed packages, innermost first."""
    reserved_bytes: int
    held: list[HeldBlock]
    free: list[FreePiece]
    failures: int
    """Requests of that device that failed in the history, this one included."""

    @property
    def allocated_bytes(self) -> int:
        return sum(block.bytes for block in self.held)

    @property
    def room_bytes(self) -> int | None:
        """What the process could have had for segments: those it had, and what was free."""
        if self.device_free_bytes is None:
            return None
        return self.reserved_bytes + self.device_free_bytes

    def largest_free(self) -> int:
        """The largest gap that the request could have taken."""
        small = self.asked_bytes <= 1 << 20
        pieces = [p.bytes for p in self.free if p.stream == self.stream and p.small == small]
        return max(pieces, default=0)


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """What one source line held."""

    bytes: int
    blocks: int
    source: str
    """Empty where unknown."""
    op: str
    phase: str


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change, and whether the request would have been served with it."""

    change: str
    fits: bool
    how: str
    """How that is known: `replayed`, `by the figures` or `by PyTorch's rules`."""
    spare_bytes: int
    """Room left then; negative: what would still be missing."""
    detail: str = ""


class OomExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request failed, what held the memory, and what would have helped."""

    schema_version: int = SCHEMA_VERSION
    memplan_version: str
    gpu: GpuInfo | None
    fits: bool
    """Whether a setting of the allocator alone would have served the request."""
    device: int
    asked_bytes: int
    source: str
    op: str
    phase: str
    step: int
    stack: list[str]
    device_free_bytes: int | None
    room_bytes: int | None
    """Room for segments: reserved plus free bytes on the device."""
    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    waiting_bytes: int
    """Released by the program, awaiting another stream; part of `allocated_bytes`."""
    unallocated_bytes: int
    """Reserved, in no block: what fragmentation cost."""
    largest_free_bytes: int
    """The largest gap that the request could have taken."""
    missing_bytes: int | None
    """What would be missing without any fragmentation; 0 where it would have fitted."""
    outside_bytes: int | None
    """Bytes of the card neither free nor in this process's segments; None without a card."""
    other_processes_bytes: int | None
    """The part of them that exceeds the largest context of this process; None without a card."""
    by_phase: dict[str, int]
    """Block bytes by what the job did when they were asked for."""
    consumers: list[Consumer]
    """Consumers by source line, the largest first."""
    remedies: list[Remedy]
    reproduced: bool
    """Whether the replay of the history fails at the same request."""
    failures: int
    alloc_conf: str
    notes: list[str]
