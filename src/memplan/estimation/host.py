"""Peak RAM of the job's process on the host, and how much of it is page-locked.

At every host event, the sum of:

- the process itself: the interpreter, PyTorch's CUDA build, the host side of the CUDA context and
  of its libraries, which cannot be seen here and are a rule (`PROCESS_BYTES`);
- host storages that have no data here, by their exact sizes;
- what became resident in the capturing process since the job began: real data, modules;
- what worker processes hold for themselves;
- page-locked memory as PyTorch's host allocator takes it: each block is a power of two, a freed
  block serves requests of the same power of two only, and none is given back
  (aten/src/ATen/core/CachingHostAllocator.h: `allocate`, `get_free_block`, `maybe_cache_block`).

The high bound adds what the C library may keep: blocks below 32 MiB may come from a heap that does
not shrink (`M_MMAP_THRESHOLD` in mallopt(3): the threshold grows with freed blocks up to 32 MiB).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memplan.simulate import AllocatorSettings
from memplan.types.estimate import HostBreakdown
from memplan.types.trace import PAGE_LOCKED, HostEventKind, Role, Trace

MIB = 1 << 20
PROCESS_BYTES = (422 * MIB, 1112 * MIB, 2816 * MIB)
"""Low, expected, high of a process that has trained on CUDA, without the job's data and modules.

Low: Python with PyTorch's CPU build after a few steps, 308 MiB (measured here), and a CUDA context
with one kernel, 114. Expected: the import of a CUDA build, 315, what the first steps add, 89
(measured here), the context, 114, and the libraries that a first convolution loads, 594. High: the
largest published total; the largest published parts come to 2744. `docs/host.md` has the sources.
"""
_LARGEST_FROM_HEAP = 32 * MIB
_OF_ROLE = {
    Role.PARAMETER: "parameters",
    Role.GRADIENT: "gradients",
    Role.OPTIMIZER_STATE: "optimizer_state",
}


@dataclass(frozen=True)
class HostAnswer:
    """Bytes of one process."""

    low: int
    peak: int
    high: int
    pinned: int
    breakdown: HostBreakdown
    """What the host memory consists of at the peak."""


def host_memory(trace: Trace, settings: AllocatorSettings) -> HostAnswer | None:
    """What the job's process needs of the host; None where the trace did not follow it."""
    about = trace.meta.host
    if about is None:
        return None
    now = _Now(settings)
    peak, at_peak, heap_peak, highest, resident = now.total(), now.sums(), 0, now.total(), 0
    host = trace.host
    rows = zip(
        host.kind.tolist(),
        host.bytes.tolist(),
        host.pinned.tolist(),
        _final_roles(trace),
        strict=True,
    )
    for kind, nbytes, pinned, role in rows:
        now.apply(kind, nbytes, pinned=pinned, role=role)
        total = now.total()
        heap_peak = max(heap_peak, now.heap)
        highest = max(highest, total + heap_peak - now.heap)
        resident = max(resident, now.resident)
        if total > peak:
            peak, at_peak = total, now.sums()
    unseen = max(about.growth_peak_bytes - resident, 0)
    low, expected, high = PROCESS_BYTES
    return HostAnswer(
        low=low + peak,
        peak=expected + peak,
        high=high + highest + unseen,
        pinned=now.pinned.peak,
        breakdown=HostBreakdown(process=expected, **at_peak),
    )


def _final_roles(trace: Trace) -> list[int]:
    """Role of each row's storage: that of its allocation, whose role is filled in later."""
    host = trace.host
    roles: dict[int, int] = {}
    found: list[int] = []
    columns = (host.kind.tolist(), host.storage.tolist(), host.role.tolist())
    for kind, storage, role in zip(*columns, strict=True):
        if kind == HostEventKind.ALLOC:
            roles[storage] = role
        found.append(roles.get(storage, role))
    return found


@dataclass
class _Now:
    """What is held after some events."""

    settings: AllocatorSettings
    resident: int = 0
    workers: int = 0
    heap: int = 0
    """Bytes of storages that are small enough to come from the C library's heap."""
    by_role: dict[str, int] = field(
        default_factory=lambda: {**dict.fromkeys(_OF_ROLE.values(), 0), "tensors": 0}
    )

    def __post_init__(self) -> None:
        self.pinned = PinnedBlocks(self.settings)

    def apply(self, kind: int, nbytes: int, *, pinned: int, role: int) -> None:
        if kind == HostEventKind.RESIDENT:
            self.resident = nbytes
        elif kind == HostEventKind.WORKERS:
            self.workers = nbytes
        else:
            change = nbytes if kind == HostEventKind.ALLOC else -nbytes
            self.by_role[_OF_ROLE.get(Role(role), "tensors")] += change
            if pinned:
                self.pinned.change(change, exact=pinned == PAGE_LOCKED)
            elif nbytes < _LARGEST_FROM_HEAP:
                self.heap += change

    def sums(self) -> dict[str, int]:
        rounding = self.pinned.held - self.pinned.requested
        return {
            **self.by_role,
            "data": self.resident,
            "workers": self.workers,
            "pinned_unused": rounding,
        }

    def total(self) -> int:
        return sum(self.sums().values())


class PinnedBlocks:
    """PyTorch's allocator of page-locked memory."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self._settings = settings
        self._free: dict[int, int] = {}
        self.requested = 0
        """Bytes of the storages that live in its blocks."""
        self.held = 0
        """Bytes of all blocks, free ones too."""
        self.peak = 0

    def change(self, nbytes: int, *, exact: bool = False) -> None:
        """A storage of so many bytes begins, or ends where the number is negative. `exact`: its own
        memory is page-locked, outside the allocator."""
        if exact:
            self.requested += nbytes
            self.held += nbytes
            self.peak = max(self.peak, self.held)
            return
        size = self.block_bytes(abs(nbytes))
        self.requested += nbytes
        if nbytes < 0:
            if size > self._settings.pinned_max_cached_size:
                self.held -= size
            else:
                self._free[size] = self._free.get(size, 0) + 1
        elif self._free.get(size, 0):
            self._free[size] -= 1
        else:
            self.held += size
            self.peak = max(self.peak, self.held)

    def block_bytes(self, nbytes: int) -> int:
        """The block that a request gets."""
        settings = self._settings
        if nbytes > min(settings.pinned_max_round_threshold, settings.pinned_max_cached_size):
            return nbytes
        return 1 << (nbytes - 1).bit_length()
