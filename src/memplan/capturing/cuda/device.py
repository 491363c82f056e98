"""Makes PyTorch believe in a CUDA device that is not there, at the level of C++.

Fake tensors on `cuda` need two things that a machine without a GPU lacks: a device guard for CUDA
(a build without CUDA registers none), and an accelerator that the autograd engine accepts. Both are
put in place here, through private interfaces of PyTorch, and taken out again, as is what times a
real device in DistributedDataParallel. Nothing else of memplan touches these interfaces;
`self_test` proves them on the installed PyTorch by one real forward and backward, and `capture`
falls back to CPU-only tracing, with wider intervals, when it fails.

Hazard: the objects handed to C++ must live as long as the process, so they are kept in module
globals and made at most once each.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memplan.capturing.patches.deferred_dynamo import dynamo

_CUDA = 1
_PRIVATEUSE1 = 20
_REGISTRY_SIZE = 22
_NO_DEVICE = 127
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_TIMERS = "_ZN4c10d13TimerRegistryEv"

# Layout of the hooks' vtable: two words before the address point (offset to top, type info), two
# destructors, then isBuilt, isAvailable, hasPrimaryContext and init.
_WORDS_BEFORE = 2
_PATCHED_SLOTS = (2, 3, 4, 5)
_COPIED_WORDS = 96

_GUARD_HEADER = "c10/core/impl/DeviceGuardImplInterface.h"
_GUARD_FUNCTION = re.compile(r"^  virtual [\w:]+\*? (\w+)\(", re.MULTILINE)
_SCOPE_END = ("uncheckedSetDevice", "exchangeStream")

MAX_DEVICES = 16
"""Devices that C++ finds. Each costs the autograd engine an idle thread, so no more than one
machine's operating system usually sees."""

_current = 0
"""Index of the current device, for C++."""

_kept: list[Any] = []
"""Objects that C++ points to; never released."""


@dataclass(frozen=True)
class SelfTest:
    """Whether fake CUDA works on the installed PyTorch, and if not, why."""

    ok: bool
    detail: str

    @property
    def too_late(self) -> bool:
        """The autograd engine counted its devices at the process's first backward pass, before
        there was a fake one; only a fresh process can help."""
        return "device_ready_queues_" in self.detail


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    folder = Path(torch.__file__).parent / "lib"
    return (
        ctypes.CDLL(str(folder / "libc10.so")),
        ctypes.CDLL(str(folder / "libtorch_cpu.so")),
    )


def _guard_registry() -> Any:
    return (ctypes.c_void_p * _REGISTRY_SIZE).in_dll(_libraries()[0], _REGISTRY)


@functools.cache
def _python_guard() -> int:
    """Address of a device guard that answers for CUDA."""

    class FakeCudaGuard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.CUDA

    registry = _guard_registry()
    before = registry[_PRIVATEUSE1]
    guard = FakeCudaGuard()
    _kept.append(guard)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    address = registry[_PRIVATEUSE1]
    registry[_PRIVATEUSE1] = before
    if address is None or address == before:
        raise RuntimeError("this PyTorch did not register a Python device guard")
    _change_functions(int(address))
    return int(address)


@functools.cache
def _guard_slots() -> dict[str, int]:
    """Places of a device guard's functions in its vtable, as the installed header declares them."""
    header = (Path(torch.__file__).parent / "include" / _GUARD_HEADER).read_text()
    return {name: slot for slot, name in enumerate(_GUARD_FUNCTION.findall(header))}


def set_current_device(index: int) -> None:
    """The device that C++ means by `cuda` without an index. Raises ValueError beyond
    `[0, MAX_DEVICES)`."""
    global _current
    if not 0 <= index < MAX_DEVICES:
        raise ValueError(f"device {index} of {MAX_DEVICES}")
    _current = index


def _change_functions(guard: int) -> None:
    """Give the guard functions of its own, in a copy of its vtable.

    The CPU guard's empty ones for what the end of a stream's scope calls: the autograd engine ends
    such a scope also while a Python error passes through, and a call into Python would lose the
    error or end the process then. Its own current stream, the only one that C++ knows, as the
    default stream. And Python's answers to how many devices there are and which is current; a
    `Device` is returned in a register, its type in the low byte and its index in the next.
    """
    word = ctypes.sizeof(ctypes.c_void_p)
    cpu = ctypes.c_void_p.from_address(_guard_registry()[0]).value
    own = ctypes.c_void_p.from_address(guard)
    assert cpu is not None and own.value is not None
    slots = _guard_slots()
    table = ctypes.c_void_p * (_WORDS_BEFORE + len(slots) + 2)  # two destructors at the end
    copy = table(*table.from_address(own.value - _WORDS_BEFORE * word))
    place = {name: _WORDS_BEFORE + slot for name, slot in slots.items()}
    for name in _SCOPE_END:
        copy[place[name]] = ctypes.c_void_p.from_address(cpu + slots[name] * word).value
    copy[place["getDefaultStream"]] = copy[place["getStream"]]
    device = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)(lambda _self: _current << 8 | _CUDA)
    count = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda _self: MAX_DEVICES)
    for name, function in (("getDevice", device), ("deviceCount", count)):
        copy[place[name]] = ctypes.cast(function, ctypes.c_void_p).value
    _kept.extend((copy, device, count))
    own.value = ctypes.addressof(copy) + _WORDS_BEFORE * word


def _hooks_object() -> Any:
    get_hooks = getattr(_libraries()[1], _CUDA_HOOKS)
    get_hooks.restype = ctypes.c_void_p
    return ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))


@functools.cache
def _patched_vtable(original: int) -> int:
    """Address point of a copy of the hooks' vtable that says yes to 'is there a device?', and has
    nothing to start."""
    word = ctypes.sizeof(ctypes.c_void_p)
    table = ctypes.c_void_p * _COPIED_WORDS
    copy = table(*table.from_address(original - _WORDS_BEFORE * word))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _self: True)
    for slot in _PATCHED_SLOTS:
        copy[_WORDS_BEFORE + slot] = ctypes.cast(yes, ctypes.c_void_p).value
    _kept.extend((copy, yes))
    return ctypes.addressof(copy) + _WORDS_BEFORE * word


def _timer_keys() -> Iterator[ctypes.c_int8]:
    """The kinds of devices for which DistributedDataParallel has timers, where they are stored.

    The registry begins with a hash table of libstdc++: buckets, their number, the first node, the
    number of nodes. A node holds the next one's address and, behind it, the key.
    """
    try:
        get_registry = getattr(_libraries()[1], _TIMERS)
    except AttributeError:  # built without torch.distributed
        return
    get_registry.restype = ctypes.c_void_p
    _, _, node, count = (ctypes.c_size_t * 4).from_address(get_registry())
    if count > _REGISTRY_SIZE:
        raise RuntimeError("this PyTorch keeps its timers of devices otherwise")
    for _ in range(count):
        yield ctypes.c_int8.from_address(node + ctypes.sizeof(ctypes.c_void_p))
        node = ctypes.c_size_t.from_address(node).value


@contextmanager
def _no_cuda_timer() -> Iterator[None]:
    """Inside, DistributedDataParallel does not time its device, as in a build without CUDA. The
    timer of a build with CUDA records real events, for which there is no driver here."""
    keys = [] if torch.version.cuda is None else [k for k in _timer_keys() if k.value == _CUDA]
    for key in keys:
        key.value = _NO_DEVICE
    try:
        yield
    finally:
        for key in keys:
            key.value = _CUDA


@contextmanager
def fake_cuda_device() -> Iterator[None]:
    """Inside, C++ finds one CUDA device. Not to be nested. Raises RuntimeError, AttributeError or
    ValueError if the installed PyTorch does not have the expected interfaces."""
    registry = _guard_registry()
    hooks = _hooks_object()
    guard_before, vtable_before = registry[_CUDA], hooks[0]
    guard, vtable = _python_guard(), _patched_vtable(vtable_before)
    registry[_CUDA] = guard
    hooks[0] = vtable
    try:
        with _no_cuda_timer():
            yield
    finally:
        registry[_CUDA] = guard_before
        hooks[0] = vtable_before


@functools.cache
def self_test() -> SelfTest:
    """One forward and backward on a fake CUDA tensor, in this process. Cached."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dynamo.start()
    try:
        with fake_cuda_device(), FakeTensorMode():
            weight = torch.empty(4, 4, device="cuda", requires_grad=True)
            loss = torch.nn.functional.linear(torch.empty(2, 4, device="cuda"), weight).sum()
            loss.backward()
            if weight.grad is None or weight.grad.device.type != "cuda":
                return SelfTest(False, "the backward pass made no gradient on the fake device")
    except Exception as error:
        return SelfTest(False, f"{type(error).__name__}: {error}")
    return SelfTest(True, f"fake CUDA works on torch {torch.__version__}")
