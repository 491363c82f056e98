"""Modes that see what a job does with tensors it will not have with the optimizer in backward.

After the backward pass they are dispatch modes, which see every operator. In the backward pass they
must not be: some of autograd's formulas (those of `prod` and `cumprod` among them) look whether one
is active and then compute in another way, with other bits. There a function mode sees what Python
code does, and `saved_weights` has asked the graph about the rest.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode_temporarily,
    resolve_name,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memplan.runtime.optimizer_in_backward.applied_gradient import too_late, where
from memplan.runtime.shards import part_of

_DEVICE_QUERY = torch.ops.prim.device.default
_ASKS = ("torch.nn.modules.activation", "torch.nn.modules.transformer")


class _Mode(TorchDispatchMode):
    """Sees operators of the process that entered it, until it is closed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._process = os.getpid()
        self._open = False

    def open(self) -> None:
        self._open = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End it. Where another mode was entered meanwhile and lies above it, or in another thread,
        it stays and does nothing until `leave_idle`."""
        self._open = False
        leave_idle()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._open and func is not _DEVICE_QUERY and os.getpid() == self._process:
            for tensor in _tensors((args, kwargs)):
                self.used(func, tensor)
        return func(*args, **(kwargs or {}))

    def used(self, func: Any, tensor: Tensor) -> None:
        raise NotImplementedError


def leave_idle() -> None:
    """Takes away what has been closed and lies on top now."""
    while (stack := _get_current_dispatch_mode_stack()) and isinstance(stack[-1], _Mode):
        if stack[-1]._open:
            return
        stack[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]


@contextmanager
def set_aside() -> Iterator[None]:
    """No mode of ours is in force: `torch.compile` refuses to compile under one."""
    aside = []
    while (stack := _get_current_dispatch_mode_stack()) and isinstance(stack[-1], _Mode):
        aside.append(stack[-1])
        stack[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for mode in reversed(aside):
            mode.__enter__()  # type: ignore[no-untyped-call]


class Watch(_Mode):
    """Notes the first use of a parameter or its gradient between the moment at which that gradient
    is complete and the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = 0
        """While above 0, the optimizer's own code runs."""
        self.finding = ""
        self._ready: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def is_ready(self, parameter: Tensor, gradient: Tensor, state: list[Tensor]) -> None:
        """`state`: the optimizer's for this parameter."""
        for tensor in state:
            self._ready[storage_of(tensor)] = weakref.ref(tensor), "the optimizer's state"
        self._ready[storage_of(parameter)] = weakref.ref(parameter), "a parameter"
        self._ready[storage_of(gradient)] = weakref.ref(gradient), "a gradient"

    def forget(self, parameter: Tensor, state: list[Tensor]) -> None:
        """It has been updated; its gradient goes on being watched."""
        for tensor in (parameter, *state):
            self._ready.pop(storage_of(tensor), None)

    def found(self, finding: str) -> None:
        self.finding = self.finding or finding

    def used(self, func: Any, tensor: Tensor) -> None:
        if self.paused or self.finding or not self._ready:
            return
        known = self._ready.get(storage_of(tensor))
        of = known[0]() if known is not None else None
        if known is None or of is None or storage_of(of) != storage_of(tensor):
            return
        self.finding = f"{_name(func)}{where()} uses {known[1]} before the optimizer does"


class Guard(_Mode):
    """Raises OptimizerInBackwardError where something uses what has been updated already."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()

    def add(self, tensors: list[Tensor]) -> None:
        """A parameter and its optimizer's state; they outlive the guard."""
        self._storages.update(map(storage_of, tensors))

    def forget(self, tensors: list[Tensor]) -> None:
        """Their optimizer has stepped."""
        self._storages.difference_update(map(storage_of, tensors))

    def found(self, finding: str) -> None:
        raise too_late(finding)

    def used(self, func: Any, tensor: Tensor) -> None:
        if storage_of(tensor) in self._storages:
            raise too_late(f"{_name(func)}{where()} comes before optimizer.step() and uses a value")


_this_thread = threading.local()


@contextmanager
def unseen() -> Iterator[None]:
    """What this thread does is no use of the job's. Other function modes go on."""
    if torch._C._len_torch_function_stack() == 1:  # ours alone: an update calls much
        with torch._C.DisableTorchFunction():
            yield
        return
    _this_thread.unseen = True
    try:
        yield
    finally:
        _this_thread.unseen = False


class InBackward(TorchFunctionMode):
    """Tells `seer` of the tensors that Python code gives to PyTorch: hooks, functions with a
    backward of their own, recomputed forward passes. Follows autograd into its threads."""

    def __init__(self, seer: Watch | Guard) -> None:
        super().__init__()
        self._seer = seer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        seen = not getattr(_this_thread, "unseen", False)
        if seen and getattr(func, "__name__", "") not in _ABOUT_TENSORS:
            for tensor in _tensors((args, kwargs)):
                self._seer.used(func, tensor)
        return func(*args, **(kwargs or {}))


_ABOUT_TENSORS = frozenset(
    {
        "__get__",  # of a property: `grad`, `shape`, … ; what comes from `data` or `T` is seen
        "__hash__",
        "__len__",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_conj",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_neg",
        "ndimension",
        "numel",
        "register_hook",
        "size",
        "storage_offset",
        "stride",
        "type",
    }
)
"""Functions that read no values."""


def storage_of(tensor: Tensor) -> int:
    """Identity of the storage, of a distributed tensor that of the rank's part; 0 for tensors that
    have none."""
    try:
        return int(part_of(tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse ones, wrappers
        return 0


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for inner in item:
            yield from _tensors(inner)
    elif isinstance(item, dict):
        yield from _tensors(list(item.values()))


def _name(func: Any) -> str:
    if "_amp_" in str(func):
        return "a GradScaler"
    return str(func) if isinstance(func, torch._ops.OpOverload) else resolve_name(func) or str(func)


@contextmanager
def fast_attention() -> Iterator[None]:
    """PyTorch's attention modules as without `InBackward`, where a checkpoint runs them again. In
    evaluation mode and without gradients they have a faster way, with other bits, that they do not
    take while any function mode is active."""
    real: Any = torch.overrides.has_torch_function

    def without_ours(arguments: Any) -> bool:
        if isinstance(_get_current_function_mode(), InBackward):
            with _pop_mode_temporarily():
                return without_ours(arguments)
        return bool(real(arguments))

    def has_torch_function(args: Iterable[Any]) -> bool:
        asks = sys._getframe(1).f_globals.get("__name__") in _ASKS
        return without_ours(args) if asks else bool(real(args))

    torch.overrides.has_torch_function = has_torch_function
    try:
        yield
    finally:
        torch.overrides.has_torch_function = real
