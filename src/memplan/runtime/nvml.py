"""The card's used memory as NVML reports it, through ctypes: no package needed, a few microseconds.

NVML counts whatever any process holds on the card: where a job runs alone, its share is what was
used while it ran less what was used before.
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


def _memory() -> _Memory | None:
    device = _device()
    if device is None:
        return None
    memory = _Memory()
    if device[0].nvmlDeviceGetMemoryInfo(device[1], ctypes.byref(memory)):
        return None
    return memory


class PeakWatch:
    """Polls the card in a thread while a block runs; `peak_bytes` is the growth over the start."""

    def __init__(self) -> None:
        self.before = used_bytes()
        self.peak = self.before
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> PeakWatch:
        if self.before is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _poll(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            used = used_bytes()
            if used is not None:
                self.peak = max(self.peak or 0, used)

    @property
    def peak_bytes(self) -> int | None:
        """Growth of the card's used memory at its highest; None where NVML cannot say."""
        if self.before is None or self.peak is None:
            return None
        return self.peak - self.before
