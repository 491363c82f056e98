"""Memory of the card and of this process on it, as NVML reports it, through ctypes: no package
needed, a few microseconds.

In a container NVML may know processes by other numbers. Then a process's share can only be told by
the growth of what all of them hold, which is right where it runs alone.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache

POLL_SECONDS = 0.005


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    """`nvmlProcessInfo_t`."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v3"
_MOST_PROCESSES = 128
_UNKNOWN_BYTES = (1 << 64) - 1


@cache
def _device() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(
        _first(), ctypes.byref(handle)
    ):
        return None
    return library, handle


def _first() -> int:
    """The card that a process started here calls `cuda:0`; NVML counts them all."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def used_bytes() -> int | None:
    """Bytes used on the first visible card by all processes; None where NVML cannot say."""
    memory = _memory()
    return int(memory.used) if memory is not None else None


def total_bytes() -> int | None:
    """Bytes that the first visible card has; None where NVML cannot say."""
    memory = _memory()
    return int(memory.total) if memory is not None else None


def process_bytes() -> int | None:
    """Bytes that this process holds on the first visible card, its CUDA context among them; None
    where NVML does not know it."""
    device = _device()
    if device is None or not hasattr(device[0], _PROCESSES):  # a driver before 510
        return None
    count, found = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
    if getattr(device[0], _PROCESSES)(device[1], ctypes.byref(count), found):
        return None
    own = [one.used for one in found[: count.value] if one.pid == os.getpid()]
    return int(own[0]) if own and own[0] != _UNKNOWN_BYTES else None


def _memory() -> _Memory | None:
    device = _device()
    if device is None:
        return None
    memory = _Memory()
    if device[0].nvmlDeviceGetMemoryInfo(device[1], ctypes.byref(memory)):
        return None
    return memory


class PeakWatch:
    """Polls NVML in a thread while a block runs: the most that this process held."""

    def __init__(self) -> None:
        self._before = used_bytes()
        self._grown = 0
        self._own: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> PeakWatch:
        if self._before is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _poll(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            own, used = process_bytes(), used_bytes()
            if own is not None:
                self._own = max(self._own or 0, own)
            if used is not None and self._before is not None:
                self._grown = max(self._grown, used - self._before)

    @property
    def peak_bytes(self) -> int | None:
        """What NVML says of this process, or the growth of the card's used memory where it does not
        know it; None where NVML does not answer."""
        if self._before is None:
            return None
        return self._grown if self._own is None else self._own
