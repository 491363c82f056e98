"""Dispatch modes that see what a job does with tensors it will not have under early updates."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memplan.runtime.early.applied_gradient import too_late

_OURS = str(Path(__file__).parents[2])
_TORCHS = str(Path(torch.__file__).parent)
_NOT_THE_JOBS = (_OURS, _TORCHS, "<")


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
        """Where another mode was entered meanwhile and lies above it, it stays and is idle."""
        if self._open and _get_current_dispatch_mode_stack()[-1:] == [self]:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._open = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._open and os.getpid() == self._process:
            for tensor in _tensors((args, kwargs)):
                self.used(func, tensor)
        return func(*args, **(kwargs or {}))

    def used(self, func: Any, tensor: Tensor) -> None:
        raise NotImplementedError


class Watch(_Mode):
    """Notes the first use of a parameter or its gradient between the moment at which that gradient
    is complete and the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = 0
        """While above 0, what runs is the optimizer's own."""
        self.finding = ""
        self._ready: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def is_ready(self, parameter: Tensor, gradient: Tensor) -> None:
        self._ready[_storage(parameter)] = weakref.ref(parameter), "a parameter"
        self._ready[_storage(gradient)] = weakref.ref(gradient), "a gradient"

    def forget(self, parameter: Tensor) -> None:
        """It has been updated; its gradient goes on being watched."""
        self._ready.pop(_storage(parameter), None)

    def used(self, func: Any, tensor: Tensor) -> None:
        if self.paused or self.finding or not self._ready:
            return
        known = self._ready.get(_storage(tensor))
        of = known[0]() if known is not None else None
        if known is None or of is None or _storage(of) != _storage(tensor):
            return
        if torch._C._current_autograd_node() is not None and _accumulates(func, known[1]):
            self.finding = "gradients are accumulated over several backward passes"
        else:
            self.finding = f"{_name(func)}{_where()} uses {known[1]} before the optimizer does"


class Guard(_Mode):
    """Raises EarlyUpdateError where something uses a parameter that has been updated early."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self._parameters = parameters
        self._storages = {_storage(parameter) for parameter in parameters}

    def used(self, func: Any, tensor: Tensor) -> None:
        if _storage(tensor) in self._storages:
            raise too_late(
                f"{_name(func)}{_where()} comes before optimizer.step() and uses a value"
            )


def _storage(tensor: Tensor) -> int:
    """Identity of the storage; 0 for tensors that have none."""
    try:
        return int(tensor.untyped_storage()._cdata)
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


def _accumulates(func: Any, what: str) -> bool:
    return what == "a gradient" and func in (
        torch.ops.aten.add_.Tensor,
        torch.ops.aten.add.Tensor,
    )


def _name(func: Any) -> str:
    if "_amp_" in str(func):
        return "a GradScaler"
    return str(func)


def _where() -> str:
    """` (train.py:12)`: the line of the job that is running; empty in the backward pass."""
    frame = sys._getframe(2)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_JOBS):
            return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
