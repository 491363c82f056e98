"""Page-locked memory of the host, of exactly the sizes asked for: PyTorch's own page-locked blocks
are rounded up to powers of two and never given back."""

from __future__ import annotations

import mmap
import os
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.cuda import _pin_memory_utils

from memplan.types.trace import PAGE_LOCKED

_CGROUPS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


class PageLock:
    """Locks pages as long as the host does not refuse."""

    def __init__(self, on_note: Callable[[str], None]) -> None:
        """`on_note` is told, in a sentence, that the host refuses."""
        self._on_note = on_note
        self._refused = False

    def lock(self, host: Tensor) -> bool:
        """A tensor's memory as it is, until it is freed; whether it is locked."""
        if isinstance(host, FakeTensor):
            _tell_capture(host)
            return True
        if self._refused:
            return False
        storage = host.untyped_storage()
        address = storage.data_ptr()
        try:
            _pin_memory_utils.pin_memory(
                address, storage.nbytes()
            )  # a capture has a stand-in for it
        except RuntimeError as error:
            self._refused = True
            self._on_note(f"the host's memory is not page-locked, copies are slower: {error}")
        else:
            weakref.finalize(storage, _unlock, _pin_memory_utils.unpin_memory, address)
        return not self._refused


def _unlock(unpin: Callable[[int], None], address: int) -> None:
    """`unpin`: the counterpart of what locked it, also after a capture has ended."""
    with suppress(RuntimeError):  # at the end of the process CUDA may be gone
        unpin(address)


@dataclass(eq=False)
class Buffer:
    """Bytes on the host."""

    bytes: Tensor
    free: Any = None
    """The event after which what is in it is no longer needed."""


class HostBuffers:
    """Buffers that go round between the steps of a job, each for copies of one size or less."""

    def __init__(self, on_note: Callable[[str], None]) -> None:
        """`on_note` is told, in a sentence, that the host refuses to lock pages."""
        self._lock = PageLock(on_note)
        self._free: list[Buffer] = []
        self._in_use = 0
        self._most = 0
        """Bytes that were in use at once."""
        self._closed = False

    def take(self, nbytes: int, card: Tensor) -> Buffer:
        """A buffer for a copy of `card`. Raises MemoryError or OSError if there is no memory."""
        fitting = [one for one in self._free if nbytes <= len(one.bytes) <= 2 * nbytes]
        if fitting:
            found = min(fitting, key=lambda one: len(one.bytes))
            self._free.remove(found)
        else:
            if self._in_use + nbytes + sum(len(one.bytes) for one in self._free) > self._most:
                self._let_go()
            found = Buffer(self._new(nbytes, card))
        self._in_use += len(found.bytes)
        self._most = max(self._most, self._in_use)
        return found

    def give(self, buffer: Buffer, free: Any) -> None:
        """It is not needed after the event `free`."""
        buffer.free = free
        self._in_use -= len(buffer.bytes)
        self._free.append(buffer)
        if self._closed:
            self._let_go()

    def close(self) -> None:
        """Keep none for later."""
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        for buffer in self._free:
            if buffer.free is not None:
                buffer.free.synchronize()
        self._free.clear()

    def _new(self, nbytes: int, card: Tensor) -> Tensor:
        if isinstance(card, FakeTensor):
            host = card.new_empty((nbytes,), dtype=torch.uint8, device="cpu")
        else:  # pages of its own: two locked blocks must not share one
            host = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        if card.is_cuda:
            self._lock.lock(host)
        return host


def _tell_capture(host: Tensor) -> None:
    """Tell a capture that a fake tensor's memory is page-locked."""
    from memplan.capturing import session

    if session._active is not None:
        session._active.state.host.pin(host, PAGE_LOCKED)


def available_bytes() -> int | None:
    """What this process may still take of the host's memory: by `/proc/meminfo` and by the limits
    of its control group; None where neither says."""
    found = []
    with suppress(OSError):
        meminfo = Path("/proc/meminfo").read_text()
        if match := re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.M):
            found.append(int(match[1]) << 10)
    for folder in _control_groups():
        for limit, usage in _CGROUPS:
            with suppress(OSError, ValueError):  # `max`: no limit
                most, used = (int((folder / name).read_text()) for name in (limit, usage))
                files = re.search(r"inactive_file (\d+)", (folder / "memory.stat").read_text())
                found.append(most - used + (int(files[1]) if files else 0))
    return min(found, default=None)


def _control_groups() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    found = [root, root / "memory"]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, name = line.split(":", 2)
            if kinds in ("", "memory"):
                place = (root / kinds / name.lstrip("/")) if kinds else root / name.lstrip("/")
                found += [place, *(one for one in place.parents if root in one.parents)]
    return found


def local_processes() -> int:
    """The number of processes of the job on this host."""
    with suppress(ValueError):
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return 1
