"""The native allocator library through ctypes: `native/planned/c_api.h`, function by function."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memplan.types.allocation import Requests, native_columns, read_requests
from memplan.types.errors import InternalError, UsageError
from memplan.types.plan import AllocationPart

ABI = 1
NAME = "libmemplan_planned.so"
DRIVER_VARIABLE = "MEMPLAN_CUDA_DRIVER"
"""Names another library than libcuda.so.1 to take device memory from."""
PHASE_EVENT = 100
EVENT = np.dtype(
    [
        ("bytes", "<i8"),
        ("storage", "<i8"),
        ("stream", "<i8"),
        ("nanoseconds", "<i8"),
        ("kind", "<i4"),
        ("thread", "<i4"),
    ]
)
"""memplan_event."""
BLOCK = np.dtype(
    [
        ("address", "<i8"),
        ("bytes", "<i8"),
        ("requested", "<i8"),
        ("segment", "<i8"),
        ("stream", "<u8"),
        ("planned", "<i4"),
        ("state", "<i4"),
    ]
)
"""memplan_block."""
_ROOM = 1 << 16
"""Events taken at a time."""

Table = npt.NDArray[np.void]
_Numbers = POINTER(c_int64)


class _Plan(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("abi", "requests", "setup", "start", "clock")),
        *((name, c_int64) for name in ("arena_bytes", "phases")),
        *((name, _Numbers) for name in ("bytes", "stream", "phase", "lower", "upper")),
        *((name, _Numbers) for name in ("offset", "space")),
        ("spaces", c_int64),
        *((name, _Numbers) for name in ("space_lower", "space_upper", "space_ranges", "ranges")),
    )


class Statistics(ctypes.Structure):
    """memplan_statistics: of one device, bytes and counts."""

    allocated: int
    allocated_peak: int
    requested: int
    requested_peak: int
    reserved: int
    reserved_peak: int
    arena_mapped: int
    arena_peak: int
    upstream_reserved: int
    mallocs: int
    frees: int
    hits: int
    dynamic: int
    adopted: int
    misses: int
    fallback_bytes: int
    fallback_peak: int
    resyncs: int
    retries: int
    ooms: int
    waits: int
    _fields_ = tuple((name, c_int64) for name in __annotations__)

    def as_dict(self) -> dict[str, int]:
        return {field[0]: int(getattr(self, field[0])) for field in self._fields_}


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "memplan_malloc": (c_void_p, (ctypes.c_ssize_t, c_int, c_void_p)),
    "memplan_free": (None, (c_void_p, ctypes.c_ssize_t, c_int, c_void_p)),
    "memplan_empty_cache": (None, (c_int,)),
    "memplan_load": (c_int, (c_int, POINTER(_Plan), c_int, c_char_p, c_size_t)),
    "memplan_unload": (None, (c_int,)),
    "memplan_enter_phase": (None, (c_int, c_int32)),
    "memplan_read_statistics": (c_int, (c_int, POINTER(Statistics))),
    "memplan_reset_peaks": (None, (c_int,)),
    "memplan_snapshot": (c_int64, (c_int, c_void_p, c_int64)),
    "memplan_record": (None, (c_int, c_int64)),
    "memplan_stop_recording": (None, (c_int,)),
    "memplan_take_events": (c_int64, (c_int, c_void_p, c_int64, _Numbers)),
    "memplan_mark": (None, (c_int, c_int64)),
    "memplan_mark_stream": (None, (c_int, c_int64, c_void_p)),
    "memplan_set_limit": (None, (c_int, c_int64)),
    "memplan_use_driver": (None, (c_char_p,)),
}


def library_path() -> Path:
    """The library in the package. Raises InternalError if the package was built without it."""
    native = importlib.util.find_spec("memplan._native")
    folders = [Path(__file__).parents[2]]
    if native is not None and native.origin is not None:
        folders.insert(0, Path(native.origin).parent)
    for folder in folders:
        if (folder / NAME).is_file():
            return folder / NAME
    raise InternalError(
        f"{NAME} is not in the memplan package",
        "install memplan again: python -m pip install --force-reinstall --no-deps memplan",
    )


class Library:
    """The allocator of this process. Devices are numbered as CUDA numbers them."""

    def __init__(self, path: Path | str | None = None) -> None:
        """Load it; the driver is loaded when device memory is first needed.

        `enter_phase(device, number)` and `mark(device, number)` are the library's own functions.

        Raises InternalError when it cannot be loaded.
        """
        self.path = Path(path) if path is not None else library_path()
        try:
            # Found by PyTorch under the same path: one library, one state.
            self._library = ctypes.CDLL(str(self.path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, arguments
            # Called in hooks: too short to let other threads run.
            brief = ctypes.PyDLL(str(self.path))
            self.enter_phase: Callable[[int, int], None] = brief.memplan_enter_phase
            self.mark: Callable[[int, int], None] = brief.memplan_mark
            for name in ("memplan_enter_phase", "memplan_mark"):
                result, arguments = _SIGNATURES[name]
                function = getattr(brief, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise InternalError(f"{self.path} cannot be used: {error}") from error
        driver = os.environ.get(DRIVER_VARIABLE)
        if driver:
            self._library.memplan_use_driver(os.fsencode(driver))

    def address_of(self, name: str) -> int:
        """Address of an exported function, for callers in C."""
        return int(ctypes.cast(getattr(self._library, name), c_void_p).value or 0)

    def malloc(self, nbytes: int, device: int = 0, stream: int = 0) -> int:
        """The address; 0 for no bytes or no memory."""
        return int(self._library.memplan_malloc(nbytes, device, stream) or 0)

    def free(self, pointer: int, nbytes: int = 0, device: int = 0, stream: int = 0) -> None:
        self._library.memplan_free(pointer, nbytes, device, stream)

    def empty_cache(self, device: int) -> None:
        self._library.memplan_empty_cache(device)

    def load(self, device: int, part: AllocationPart, *, in_round: bool = False) -> None:
        """Put a plan into effect on a device. `in_round`: the job is past its setup.

        Raises UsageError with the reason when the library refuses it.
        """
        requests = read_requests(part)
        plan, keep = _as_structure(part, requests)
        why = ctypes.create_string_buffer(512)
        refused = self._library.memplan_load(device, byref(plan), int(in_round), why, len(why))
        del keep
        if refused:
            reason = why.value.decode("utf-8", "replace")
            raise UsageError(f"the plan is refused: {reason}", "make it again: memplan plan")

    def unload(self, device: int) -> None:
        self._library.memplan_unload(device)

    def statistics(self, device: int) -> Statistics | None:
        """None for a device that has made no request."""
        found = Statistics()
        failed = self._library.memplan_read_statistics(device, byref(found))
        return None if failed else found

    def reset_peaks(self, device: int) -> None:
        self._library.memplan_reset_peaks(device)

    def snapshot(self, device: int) -> Table:
        """Blocks by address within segments, as `BLOCK`."""
        count = int(self._library.memplan_snapshot(device, None, 0))
        while True:
            room = count + 64
            table = np.zeros(room, BLOCK)
            count = int(self._library.memplan_snapshot(device, table.ctypes.data, room))
            if count <= room:
                return table[:count]

    def record(self, device: int, most: int) -> None:
        self._library.memplan_record(device, most)

    def stop_recording(self, device: int) -> None:
        self._library.memplan_stop_recording(device)

    def take_events(self, device: int) -> tuple[Table, int]:
        """The events kept so far, as `EVENT`, which are then forgotten; and how many were lost."""
        pieces: list[Table] = []
        lost = c_int64(0)
        while True:
            table = np.empty(_ROOM, EVENT)
            got = self._library.memplan_take_events(device, table.ctypes.data, _ROOM, byref(lost))
            pieces.append(table[:got].copy() if got < _ROOM else table)
            if got < _ROOM:
                return np.concatenate(pieces), lost.value

    def mark_stream(self, device: int, number: int, stream: int) -> None:
        """A mark with the stream's number, -1 for one without requests; `stream` is its handle."""
        self._library.memplan_mark_stream(device, number, stream)

    def set_limit(self, device: int, nbytes: int) -> None:
        self._library.memplan_set_limit(device, nbytes)


def _as_structure(part: AllocationPart, requests: Requests) -> tuple[_Plan, list[Any]]:
    """The plan as the library reads it, and the arrays that it points to."""
    arrays = native_columns(part, requests)
    plan = _Plan(
        abi=ABI,
        requests=part.requests,
        setup=part.setup,
        start=part.start,
        clock=part.clock,
        arena_bytes=part.arena_bytes,
        phases=len(part.phases),
        spaces=len(part.spaces),
        **{name: array.ctypes.data_as(_Numbers) for name, array in arrays.items()},
    )
    return plan, list(arrays.values())
