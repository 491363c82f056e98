"""PyTorch's memory functions, answered for the planned allocator.

Under a pluggable allocator PyTorch's own raise or are silent. All of them ask `torch._C`; what it
answers is replaced there, so that `torch.cuda.memory_allocated` and the rest, `torch.accelerator`'s
too, are true however they were imported. Counters that are not kept are absent from
`memory_stats`. docs/run.md lists what is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan.capturing.patches.attributes import Patches
from memplan.report.text import format_bytes
from memplan.runtime.planned.library import Library, Statistics, Table

_STATES = ("inactive", "active_allocated", "active_awaiting_free")
_SMALL = 1 << 20
"""Segments of smaller requests are small ones, in PyTorch's words."""


class MemoryFunctions:
    """The replaced functions; a context manager."""

    def __init__(self, library: Library, peaks: Peaks, devices: list[int]) -> None:
        self._library = library
        self._peaks = peaks
        self._devices = devices
        self._patches = Patches()
        self._fraction: dict[int, float] = {}

    def __enter__(self) -> MemoryFunctions:
        answers: dict[str, Callable[..., Any]] = {
            "_cuda_memoryStats": self.stats,
            "_cuda_resetPeakMemoryStats": self._peaks.reset_users,
            "_cuda_resetAccumulatedMemoryStats": _nothing,
            "_cuda_emptyCache": self.empty_cache,
            "_cuda_memorySnapshot": self.snapshot,
            "_cuda_setMemoryFraction": self.set_fraction,
            "_cuda_getMemoryFraction": lambda device: self._fraction.get(device, 1.0),
            "_accelerator_getDeviceStats": self.stats,
            "_accelerator_resetPeakStats": self._peaks.reset_users,
            "_accelerator_resetAccumulatedStats": _nothing,
            "_accelerator_emptyCache": self.empty_cache,
        }
        for name, answer in answers.items():
            self._patches.set(torch._C, name, answer, new=True)  # most are of a build for CUDA
        for module in (torch.cuda, torch.cuda.memory):
            self._patches.set(module, "memory_summary", self.summary)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._patches.undo()

    def stats(self, device: int) -> dict[str, Any]:
        """What `memory_stats_as_nested_dict` returns; zeros before the first request."""
        found = self._peaks.statistics(device) or Statistics()
        return {
            "allocated_bytes": _all(found.allocated, found.allocated_peak),
            "active_bytes": _all(found.allocated, found.allocated_peak),
            "requested_bytes": _all(found.requested, found.requested_peak),
            "reserved_bytes": _all(found.reserved, found.reserved_peak),
            "allocation": {
                "all": {
                    "current": found.mallocs - found.frees,
                    "allocated": found.mallocs,
                    "freed": found.frees,
                }
            },
            "num_alloc_retries": found.retries,
            "num_ooms": found.ooms,
            "memplan": found.as_dict(),
        }

    def empty_cache(self) -> None:
        for device in self._devices:
            self._library.empty_cache(device)

    def set_fraction(self, fraction: float, device: int) -> None:
        total = torch.cuda.get_device_properties(device).total_memory
        self._fraction[device] = fraction
        self._library.set_limit(device, int(fraction * total))

    def snapshot(self, _which: Any = None) -> dict[str, Any]:
        """Segments and blocks as PyTorch's viewer reads them; without frames and history."""
        segments: list[dict[str, Any]] = []
        for device in self._devices:
            if self._library.statistics(device) is not None:
                segments += _segments(self._library.snapshot(device), device)
        return {
            "segments": segments,
            "device_traces": [[] for _ in self._devices],
            "allocator_settings": {},
            "external_annotations": [],
        }

    def summary(self, device: Any = None, abbreviated: bool = False) -> str:
        """Replaces `torch.cuda.memory_summary`: what the allocator knows, as text."""
        number = torch.cuda.device(device).idx
        found = self._peaks.statistics(number) or Statistics()
        rows = [
            ("allocated", found.allocated, found.allocated_peak),
            ("requested", found.requested, found.requested_peak),
            ("reserved", found.reserved, found.reserved_peak),
            ("of it, arena", found.arena_mapped, found.arena_peak),
        ]
        lines = [f"memplan's planned allocator, device {number}: now, peak"]
        lines += [f"  {n:<14}{format_bytes(a):>10}{format_bytes(b):>12}" for n, a, b in rows]
        if not abbreviated:
            counts = found.as_dict()
            names = ("hits", "dynamic", "adopted", "misses", "resyncs", "retries", "ooms")
            lines.append("  " + ", ".join(f"{counts[name]} {name}" for name in names))
        return "\n".join(lines) + "\n"


def _all(current: int, peak: int) -> dict[str, dict[str, int]]:
    return {"all": {"current": current, "peak": peak}}


def _nothing(_device: int) -> None:
    """Totals since the beginning are not kept."""


def _segments(blocks: Table, device: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    number = -1
    for block in blocks.tolist():
        address, size, requested, segment, stream, planned, state = block
        if segment != number:
            number = segment
            found.append(
                {
                    "device": device, "address": address, "stream": stream,
                    "segment_type": "large", "segment_pool_id": (0, 0),
                    "is_expandable": bool(planned), "frames": [], "blocks": [],
                    "total_size": 0, "allocated_size": 0, "active_size": 0, "requested_size": 0,
                }
            )  # fmt: skip
        last = found[-1]
        last["total_size"] = address + size - last["address"]
        last["allocated_size"] += size if state == 1 else 0
        last["active_size"] += size if state else 0
        last["requested_size"] += requested
        last["blocks"].append(
            {
                "address": address,
                "size": size,
                "requested_size": requested,
                "state": _STATES[state],
                "frames": [],
            }
        )
    for segment in found:
        if segment["total_size"] <= 2 * _SMALL and not segment["is_expandable"]:
            segment["segment_type"] = "small"
    return found


_PEAKS = ("allocated_peak", "requested_peak", "reserved_peak")


class Peaks:
    """The peaks of all devices, in bytes, since different beginnings, of counters that know one.

    The user's begins with the job, or where the job resets it; ours where a plan came into effect.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._users: dict[tuple[int, str], int] = {}
        """Reached before the counters were last reset."""
        self._ours: dict[tuple[int, str], int] = {}

    def statistics(self, device: int) -> Statistics | None:
        """What the device's allocator counts, with the peaks that the user is to see."""
        found = self._library.statistics(device)
        if found is not None:
            for name in _PEAKS:
                before = self._users.get((device, name), 0)
                setattr(found, name, max(before, getattr(found, name)))
        return found

    def ours(self, device: int) -> dict[str, int]:
        """The peaks since `begin_ours`, or since the job began."""
        found = self._library.statistics(device)
        if found is None:
            return dict.fromkeys(_PEAKS, 0)
        return {
            name: max(self._ours.get((device, name), 0), getattr(found, name)) for name in _PEAKS
        }

    def reset_users(self, device: int) -> None:
        """The job resets its peaks."""
        self._ours.update({(device, name): peak for name, peak in self.ours(device).items()})
        for name in _PEAKS:
            self._users.pop((device, name), None)
        self._library.reset_peaks(device)

    def begin_ours(self, device: int) -> None:
        found = self.statistics(device)
        if found is not None:
            self._users.update({(device, name): getattr(found, name) for name in _PEAKS})
        for name in _PEAKS:
            self._ours.pop((device, name), None)
        self._library.reset_peaks(device)
