"""NVML as the chosen card's machine would have it, below the Python package that calls it.

`pynvml` (of nvidia-ml-py) looks each function up in the driver's library and passes it C structures
to fill in. Here that library is an object of Python functions. One that it does not have gives 0
where it asks a card for a number (power, temperature, clocks), and answers "not supported" where
that is a limit, by which scripts divide, and elsewhere, as a card does that cannot tell. Nothing
else runs on the cards; of the job's own memory they know what `torch.cuda.mem_get_info` does.
"""

# ruff: noqa: N802 - the names are NVML's

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from typing import Any

from memplan.capturing.cuda.fake_cuda import FakeCuda
from memplan.capturing.cuda.nvidia_smi import fields
from memplan.capturing.patches.attributes import Patches

_SUCCESS, _INVALID_ARGUMENT, _NOT_SUPPORTED, _NOT_FOUND = 0, 2, 3, 6
_NUMBERS = (ctypes.c_int, ctypes.c_uint, ctypes.c_ulonglong)
_LIMITS = ("Limit", "Max")
_MESSAGES = {
    _SUCCESS: b"Success",
    _INVALID_ARGUMENT: b"Invalid Argument",
    _NOT_SUPPORTED: b"Not Supported",
    _NOT_FOUND: b"Not Found",
}


def adapter(patches: Patches, api: FakeCuda) -> Callable[[types.ModuleType], None]:
    """Puts the library in the place of the driver's, until `patches.undo()`."""

    def adapt(pynvml: types.ModuleType) -> None:
        if hasattr(pynvml, "nvmlLib"):
            patches.set(pynvml, "nvmlLib", _Library(api))
            patches.set(pynvml, "_nvmlGetFunctionPointer_cache", {})

    return adapt


class _Library:
    """Functions of `nvml.h` by name, with the arguments that `pynvml` gives them."""

    def __init__(self, api: FakeCuda) -> None:
        self._api = api
        self._cards = [fields(api.profile, index, api.devices) for index in range(api.devices)]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        method = getattr(type(self), "_" + name.removeprefix("nvml").partition("_v")[0], None)

        def function(*args: Any) -> Any:  # pynvml sets attributes of it
            if method is not None:
                return method(self, *args)
            place = getattr(args[-1], "_obj", None) if args else None
            asks = name.startswith("nvmlDeviceGet") and type(place) in _NUMBERS
            if not asks or any(word in name for word in _LIMITS):
                return _NOT_SUPPORTED
            return _number(args[-1], 0)

        return function

    def _InitWithFlags(self, _flags: int) -> int:
        return _SUCCESS

    def _Shutdown(self) -> int:
        return _SUCCESS

    def _ErrorString(self, code: int) -> bytes:
        return _MESSAGES.get(code, b"Unknown Error")

    def _SystemGetDriverVersion(self, buffer: Any, _length: Any) -> int:
        return _text(buffer, self._cards[0]["driver_version"])

    def _SystemGetCudaDriverVersion(self, version: Any) -> int:
        major, minor = self._cards[0]["cuda_version"].split(".")
        return _number(version, 1000 * int(major) + 10 * int(minor))

    def _DeviceGetCount(self, count: Any) -> int:
        return _number(count, len(self._cards))

    def _DeviceGetHandleByIndex(self, index: Any, handle: Any) -> int:
        if index.value >= len(self._cards):
            return _INVALID_ARGUMENT
        ctypes.c_void_p.from_buffer(handle._obj).value = index.value + 1
        return _SUCCESS

    def _DeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:
        return self._named("uuid", uuid, handle)

    def _DeviceGetHandleByPciBusId(self, bus: Any, handle: Any) -> int:
        return self._named("pci.bus_id", bus, handle)

    def _DeviceGetName(self, handle: Any, buffer: Any, _length: Any) -> int:
        return _text(buffer, self._card(handle)["name"])

    def _DeviceGetUUID(self, handle: Any, buffer: Any, _length: Any) -> int:
        return _text(buffer, self._card(handle)["uuid"])

    def _DeviceGetIndex(self, handle: Any, index: Any) -> int:
        return _number(index, int(self._card(handle)["index"]))

    _DeviceGetMinorNumber = _DeviceGetIndex

    def _DeviceGetCudaComputeCapability(self, _handle: Any, major: Any, minor: Any) -> int:
        _number(major, self._api.profile.capability[0])
        return _number(minor, self._api.profile.capability[1])

    def _DeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        free, total = self._api.mem_get_info()
        if int(self._card(handle)["index"]) != self._api.index:
            free = total
        memory._obj.total, memory._obj.free, memory._obj.used = total, free, total - free
        return _SUCCESS

    def _DeviceGetUtilizationRates(self, _handle: Any, rates: Any) -> int:
        rates._obj.gpu = rates._obj.memory = 0
        return _SUCCESS

    def _DeviceGetComputeRunningProcesses(self, _handle: Any, count: Any, _found: Any) -> int:
        return _number(count, 0)

    _DeviceGetGraphicsRunningProcesses = _DeviceGetComputeRunningProcesses

    def _named(self, field: str, wanted: Any, handle: Any) -> int:
        text = getattr(wanted, "value", wanted)
        name = text.decode() if isinstance(text, bytes) else text
        index = next((i for i, card in enumerate(self._cards) if card[field] == name), None)
        if index is None:
            return _NOT_FOUND
        return self._DeviceGetHandleByIndex(ctypes.c_uint(index), handle)

    def _card(self, handle: Any) -> dict[str, str]:
        return self._cards[(ctypes.cast(handle, ctypes.c_void_p).value or 1) - 1]


def _number(place: Any, value: int) -> int:
    place._obj.value = value
    return _SUCCESS


def _text(buffer: Any, value: str) -> int:
    buffer.value = value.encode()
    return _SUCCESS
