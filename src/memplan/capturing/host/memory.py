"""The host's RAM as the job's own process would use it: storages that have no data here.

Tensors on the CPU that are fake (parameters before they are moved, offloaded states, copies of
what is on the device) take no memory in this process, so their lives are recorded, as the device's
are. Real ones are here, in the resident memory, which is sampled (`host_process`). Between the two:

- a fake parameter made of real data counts from the moment at which the data are gone;
- a real tensor that an operator fills from the device stays as it is here: what of it is not
  resident yet counts from then on;
- page-locked memory counts by itself, for PyTorch's allocator rounds it up and keeps it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.host.process import HostProcess, absent_bytes
from memplan.capturing.recording.recorder import Recorder
from memplan.types.trace import HostCapture, HostEventKind, Role

_STANDS_IN = "_memplan_stands_in"
_SMALLEST = 64 << 10
"""Real tensors below this are taken to be resident."""


@dataclass(slots=True)
class _Live:
    """A host storage that is alive."""

    number: int
    """-1 while real data still hold its memory."""
    row: int
    """Row of its allocation."""
    nbytes: int
    pinned: int
    """As in a trace: 0, 1 or `PAGE_LOCKED`."""
    role: Role
    references: list[object]
    address: int = 0
    """Address of page-locked data that are real, and so resident here, too; 0 for others."""


class HostMemory:
    """Live host storages, and the rows that their events go to."""

    def __init__(self, recorder: Recorder, *, enabled: bool) -> None:
        self.enabled = enabled
        """False where the CPU stands for the device: nothing then is the host's."""
        self._recorder = recorder
        self._builder = recorder.builder
        self._live: dict[int, _Live] = {}
        """Keyed by the address of the C++ storage."""
        self._changes: deque[tuple[bool, int]] = deque()
        """Storages that died (True), and those whose real data did (False)."""
        self._counted = 0
        self._process = HostProcess(self._builder)
        self._lock = threading.RLock()
        """A loader's thread pins its batches beside what the job does."""

    def restart(self) -> None:
        """Forget everything; from now on the job runs."""
        self._live.clear()
        self._changes.clear()
        self._counted = 0
        self._process.restart()

    def capture(self, local_processes: int) -> HostCapture | None:
        """What the trace's header says; None where nothing was followed."""
        if not self.enabled:
            return None
        with self._lock:
            self.flush()
            self._process.sample(self._locked_here)
        return HostCapture(self._process.growth_peak(), local_processes)

    def tick(self) -> None:
        """Called at each operator: looks at the process now and then."""
        if self.enabled and self._process.due():
            with self._lock:
                self.flush()
                self._process.sample(self._locked_here)

    @contextmanager
    def not_the_jobs(self) -> Iterator[None]:
        """What the process grows by meanwhile is not counted."""
        with self._lock, self._process.not_the_jobs():
            yield

    def track(self, tensor: torch.Tensor) -> None:
        """An operator's result that lives on the host."""
        if not self.enabled or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if not getattr(storage, _STANDS_IN, False):
            self._begin(storage, storage.nbytes())

    def stand_in(self, fake: torch.Tensor) -> None:
        """A fake tensor that stands for a real one, which is here, for one operator."""
        setattr(fake.untyped_storage(), _STANDS_IN, True)

    def adopt(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """A fake parameter takes the place of real data, and counts once these are gone."""
        if not self.enabled or fake.device.type != "cpu":
            return
        storage, data = fake.untyped_storage(), real.untyped_storage()
        setattr(storage, _STANDS_IN, False)
        found = self._begin(storage, storage.nbytes(), Role.PARAMETER, later=True)
        if found is not None:
            gone = partial(self._changed, False, storage._cdata)
            found.references.append(weakref.ref(data, gone))

    def written(self, tensor: torch.Tensor) -> None:
        """A real tensor was filled with what does not exist here."""
        if not self.enabled or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() < _SMALLEST or storage._cdata in self._live:
            return
        absent = absent_bytes(storage.data_ptr(), storage.nbytes())
        if absent:
            self._begin(storage, absent)

    def pin(self, tensor: torch.Tensor, how: int = 1) -> None:
        """Note that the storage is page-locked, by PyTorch's allocator or (`PAGE_LOCKED`) as it
        is."""
        if not self.enabled or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        with self._lock:
            found = self._begin(storage, storage.nbytes(), pinned=how)
            if found is None:
                return
            if not found.pinned:
                found.pinned = how
                if found.row >= 0:
                    self._builder.set_host_pinned(found.row, how)
            if not isinstance(tensor, FakeTensor) and found.nbytes >= _SMALLEST:
                found.address = storage.data_ptr()

    def _locked_here(self) -> int:
        """Resident bytes of real page-locked storages, which count by their rows."""
        locked = [live for live in self._live.values() if live.address]
        return sum(live.nbytes - absent_bytes(live.address, live.nbytes) for live in locked)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        self.flush()
        found = self._live.get(tensor.untyped_storage()._cdata)
        return found is not None and bool(found.pinned)

    def role_of(self, tensor: torch.Tensor, role: Role) -> None:
        """Say what a live storage is for."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        if found is not None:
            found.role = role
            if found.row >= 0:
                self._builder.set_host_role(found.row, role)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size."""
        with self._lock:
            self.flush()
            found = self._live.get(storage._cdata)
            if found is None or found.nbytes == storage.nbytes():
                return
            self._end(found)
            found.nbytes, found.number, found.row = storage.nbytes(), -1, -1
            self._count(found)

    def _begin(
        self,
        storage: torch.UntypedStorage,
        nbytes: int,
        role: Role = Role.UNKNOWN,
        *,
        pinned: int = 0,
        later: bool = False,
    ) -> _Live | None:
        """The storage's entry, a new one where it has none; None for one without bytes. `later`: it
        counts once `_changed` has been told so."""
        key = storage._cdata
        with self._lock:
            self.flush()
            found = self._live.get(key)
            if found is not None or nbytes == 0 or self._recorder.finished:
                return found
            dies = weakref.ref(storage, partial(self._changed, True, key))
            found = self._live[key] = _Live(-1, -1, nbytes, pinned, role, [dies])
            if not later:
                self._count(found)
            return found

    def _count(self, found: _Live) -> None:
        if found.nbytes:
            found.number = self._counted
            self._counted += 1
            found.row = self._builder.append_host(
                HostEventKind.ALLOC,
                found.number,
                found.nbytes,
                pinned=found.pinned,
                role=found.role,
            )

    def _end(self, found: _Live) -> None:
        if found.row >= 0:
            self._builder.append_host(
                HostEventKind.FREE,
                found.number,
                found.nbytes,
                pinned=found.pinned,
                role=found.role,
            )

    def flush(self) -> None:
        """Append what happened since the last event."""
        with self._lock:
            while self._changes and not self._recorder.finished:
                died, key = self._changes.popleft()
                found = self._live.get(key)
                if died and found is not None:
                    self._end(self._live.pop(key))
                elif found is not None and found.row < 0:
                    self._count(found)

    def _changed(self, died: bool, key: int, _reference: object) -> None:
        self._changes.append((died, key))
