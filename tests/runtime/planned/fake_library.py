"""A library in Python for tests of what is around the real one: it hands out numbers, keeps events
and serves a plan in sequence; and a mode that asks it for the storages of a job on the CPU."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.runtime.planned.job import Job
from memplan.runtime.planned.library import BLOCK, EVENT, PHASE_EVENT, Statistics, Table
from memplan.types.allocation import Requests, read_requests
from memplan.types.errors import UsageError
from memplan.types.plan import AllocationPart
from memplan.types.trace import EventKind


def wait_for_plan(job: Job) -> None:
    """Until the planner at work, if any, has ended; its plan comes into effect with the step."""
    while job._planning is not None and not job._planning.done:
        time.sleep(0.01)


class FakeLibrary:
    """One device. A request is a hit when it has the bytes of the plan's next one; after a miss the
    next request of that size is looked for."""

    def __init__(self) -> None:
        self.path = Path("fake.so")
        self.counts = Statistics()
        self.phases: list[int] = []
        self.loads: list[tuple[int, bool]] = []
        self.refuse = ""
        self._events: list[tuple[int, int, int, int, int, int]] | None = None
        self._most = 0
        self._lost = 0
        self._alive: dict[int, tuple[int, int]] = {}
        self._next = 0
        self._plan: tuple[AllocationPart, Requests] | None = None
        self._at = 0
        self._lock = threading.RLock()

    def malloc(self, nbytes: int) -> int:
        with self._lock:
            counts, number = self.counts, self._next
            self._next += 1
            counts.mallocs += 1
            counts.requested += nbytes
            counts.allocated += -(-nbytes // 512) * 512
            counts.requested_peak = max(counts.requested_peak, counts.requested)
            counts.allocated_peak = max(counts.allocated_peak, counts.allocated)
            counts.reserved = max(counts.reserved, counts.allocated)
            counts.reserved_peak = max(counts.reserved_peak, counts.reserved)
            self._alive[number] = (nbytes, number)
            self._keep(nbytes, number, EventKind.ALLOC)
            self._serve(nbytes)
            return number

    def _serve(self, nbytes: int) -> None:
        if self._plan is None:
            return
        part, requests = self._plan
        known = not self.phases or self.phases[-1] >= 0
        for ahead in range(part.requests - part.setup if known else 0):
            at = self._at + ahead
            if at >= part.requests:
                at -= part.requests - part.setup
            if requests.bytes[at] == nbytes:
                self.counts.hits += 1
                self._at = at + 1 if at + 1 < part.requests else part.setup
                return
        self.counts.misses += 1

    def free(self, number: int) -> None:
        with self._lock:
            nbytes, _ = self._alive.pop(number)
            self.counts.frees += 1
            self.counts.requested -= nbytes
            self.counts.allocated -= -(-nbytes // 512) * 512
            self._keep(0, number, EventKind.FREE)

    def _keep(self, nbytes: int, storage: int, kind: int) -> None:
        if self._events is None:
            return
        if len(self._events) < self._most:
            self._events.append((nbytes, storage, 0, time.monotonic_ns(), int(kind), 0))
        else:
            self._lost += 1

    # What the binding has

    def enter_phase(self, _device: int, number: int) -> None:
        self.phases.append(number)

    def mark(self, _device: int, number: int) -> None:
        self._keep(number, -1, PHASE_EVENT)

    def mark_stream(self, _device: int, number: int, stream: int) -> None:
        self._keep(number, -1, PHASE_EVENT)

    def load(self, _device: int, part: AllocationPart, *, in_round: bool = False) -> None:
        if self.refuse:
            raise UsageError(f"the plan is refused: {self.refuse}")
        self._plan = part, read_requests(part)
        self._at = part.setup if in_round else 0
        self.loads.append((part.requests, in_round))

    def unload(self, _device: int) -> None:
        self._plan = None

    def statistics(self, device: int) -> Statistics | None:
        if device or not self.counts.mallocs:
            return None
        found = Statistics()
        for name, value in self.counts.as_dict().items():
            setattr(found, name, value)
        return found

    def reset_peaks(self, _device: int) -> None:
        counts = self.counts
        counts.allocated_peak, counts.requested_peak = counts.allocated, counts.requested
        counts.reserved_peak = counts.reserved

    def record(self, _device: int, most: int) -> None:
        with self._lock:
            self._events, self._most, self._lost = [], most, 0
            for number, (nbytes, _) in self._alive.items():
                self._keep(nbytes, number, EventKind.ALLOC)

    def stop_recording(self, _device: int) -> None:
        self._events = None

    def take_events(self, _device: int) -> tuple[Table, int]:
        with self._lock:
            events, self._events = self._events or [], []
            return np.array(events, EVENT), self._lost

    def empty_cache(self, _device: int) -> None:
        self.counts.reserved = self.counts.allocated

    def set_limit(self, _device: int, nbytes: int) -> None:
        self.limit = nbytes

    def snapshot(self, _device: int) -> Table:
        rows, address = [], 1 << 21
        for nbytes, _ in self._alive.values():
            size = -(-nbytes // 512) * 512
            rows.append((address, size, nbytes, 0, 0, 0, 1))
            address += size
        return np.array(rows, BLOCK)


class StorageWatch(TorchDispatchMode):
    """Asks a library for every storage that an operator makes, and gives back those that go."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self._library = library
        self._known: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._ask_for(tensor.untyped_storage())
        return out

    def _ask_for(self, storage: torch.UntypedStorage) -> None:
        where = storage._cdata
        if storage.nbytes() and not self._known[where]:
            self._known[where] += 1
            weakref.finalize(storage, self._gone, where, self._library.malloc(storage.nbytes()))

    def _gone(self, where: int, number: int) -> None:
        del self._known[where]
        self._library.free(number)
