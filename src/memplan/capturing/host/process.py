"""What the capturing process and the job's workers hold in RAM, sampled from `/proc`.

Elsewhere than on Linux nothing can be sampled, and the job's real data are not seen.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import process as processes
from pathlib import Path
from time import thread_time

from memplan.types.builder import TraceBuilder
from memplan.types.deadline import Deadline
from memplan.types.trace import HostEventKind

_INTERVAL_SECONDS = 0.05
_WORKERS_INTERVAL_SECONDS = 0.5
_SHARE = 0.02
"""The largest share of the processor's time: to answer, the kernel walks all pages of a worker or
of page-locked memory."""
_NOTEWORTHY = 1 << 20
"""Changes below this are not recorded."""
_PRIVATE = (b"Private_Clean:", b"Private_Dirty:", b"Private_Hugetlb:")


class HostProcess:
    """Samples of this process and its workers."""

    def __init__(self, builder: TraceBuilder) -> None:
        self._builder = builder
        self._statm = _Statm()
        self._last: dict[HostEventKind, int] = {}
        self._next = self._next_workers = Deadline(0)
        self.restart()

    def restart(self) -> None:
        """The job begins: what is resident now is not the job's."""
        self._baseline = self._statm.resident_bytes()
        self._peak_before = peak_resident_bytes()
        self._last.clear()
        self._counted_peak = 0
        self._next = self._next_workers = Deadline(0)

    @contextmanager
    def not_the_jobs(self) -> Iterator[None]:
        """What becomes resident meanwhile is not the job's."""
        before = self._statm.resident_bytes()
        try:
            yield
        finally:
            self._baseline += max(self._statm.resident_bytes() - before, 0)

    def due(self) -> bool:
        """Whether it is time for another sample."""
        return self._next.passed

    def sample(self, count: Callable[[], int] = int) -> None:
        """Append what has changed since the last sample, less the resident bytes that by `count`
        are counted elsewhere."""
        began = thread_time()
        counted = count()
        grown = self._statm.resident_bytes() - self._baseline - self._builder.nbytes()
        self._counted_peak = max(self._counted_peak, counted)
        self._append(HostEventKind.RESIDENT, max(grown - counted, 0))
        self._next = _pause(_INTERVAL_SECONDS, began)
        if self._next_workers.passed:
            began = thread_time()
            self._append(HostEventKind.WORKERS, _workers_bytes())
            self._next_workers = _pause(_WORKERS_INTERVAL_SECONDS, began)

    def growth_peak(self) -> int:
        """The largest growth since the job began, also between samples, less the most that is
        counted elsewhere; 0 where the process held more before."""
        peak = peak_resident_bytes()
        if peak <= self._peak_before or not self._baseline:
            return 0
        return max(peak - self._baseline - self._builder.nbytes() - self._counted_peak, 0)

    def _append(self, kind: HostEventKind, nbytes: int) -> None:
        if abs(nbytes - self._last.get(kind, 0)) >= _NOTEWORTHY:
            self._last[kind] = nbytes
            self._builder.append_host(kind, -1, nbytes)


def _pause(at_least: float, began: float) -> Deadline:
    """The time until the next sample, where the last one began at this thread's time `began`."""
    return Deadline(max(at_least, (thread_time() - began) / _SHARE))


class _Statm:
    """Resident memory of this process, from a file that stays open: it is read many times, and the
    script may have its own idea of `open`."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None

    def resident_bytes(self) -> int:
        if self._file is None:
            return 0
        return int(os.pread(self._file, 128, 0).split()[1]) * mmap.PAGESIZE

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def peak_resident_bytes() -> int:
    """Most that this process has ever held. Linux's `ru_maxrss` begins with what the process that
    started this one held, so it is asked only where there is nothing better."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        lines = dict(line.split(":", 1) for line in text.splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def capture_peak_bytes() -> int:
    """Resident memory of this process and of its largest child, at their peaks."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return peak_resident_bytes() + children


def absent_bytes(address: int, nbytes: int) -> int:
    """Bytes of `[address, address + nbytes)` in pages that are not resident, by `mincore(2)`; 0
    where it cannot be asked."""
    page = mmap.PAGESIZE
    start = -(-address // page) * page
    pages = (address + nbytes - start) // page
    if pages <= 0 or not hasattr(_LIBC, "mincore"):
        return 0
    vector = ctypes.create_string_buffer(pages)
    if _LIBC.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), vector) != 0:
        return 0
    return vector.raw.translate(_RESIDENT_BIT).count(0) * page


_LIBC = ctypes.CDLL(None)
_RESIDENT_BIT = bytes(flags & 1 for flags in range(256))


def _workers_bytes() -> int:
    """Memory that the job's worker processes share with nobody: pages of a forked worker that
    neither side has written stay shared, and are counted here once."""
    children = list(getattr(processes, "_children", ()))
    return sum(_private_bytes(child.pid) for child in children if child.pid is not None)


def _private_bytes(pid: int) -> int:
    try:
        file = os.open(f"/proc/{pid}/smaps_rollup", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(file, 1 << 16)
        finally:
            os.close(file)
    except OSError:  # it has ended
        return 0
    lines = (line.split() for line in text.splitlines() if line.startswith(_PRIVATE))
    return sum(int(words[1]) * 1024 for words in lines)
