"""The memory that CUDA kernels allocate for themselves in a single call of an operator, by the
rules of captures (`KernelMemory`), for a graph whose operators do not run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from memplan.capturing.kernels import rnn
from memplan.capturing.operators.kernel_memory import KernelMemory
from memplan.capturing.operators.recurrent import backward_call, forward_call
from memplan.types.device import DeviceProfile

aten = torch.ops.aten

_BACKWARD = aten.convolution_backward.default
_RECURRENT = {
    aten._cudnn_rnn.default: forward_call,
    aten._cudnn_rnn_backward.default: backward_call,
}


@dataclass(frozen=True)
class CallMemory:
    """Bytes that a call needs beside the operator's results."""

    expected: int = 0
    """The most at once, freed when the call returns."""
    high: int = 0
    """The same, with the largest workspaces that a library may choose."""
    kept: int = 0
    """Bytes that a library keeps, once for each thread."""


NOTHING = CallMemory()


class CallRules:
    def __init__(self, profile: DeviceProfile) -> None:
        self._asked = _Asked()
        self._memory = KernelMemory(self._asked, profile)  # type: ignore[arg-type]
        self._observers = self._memory.observers()

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> CallMemory:
        """The memory of a call with fake tensors on CUDA; nothing for other devices, or without a
        rule. `cudnn.benchmark` tries its plans in each call, as in the first one."""
        asked = self._asked
        asked.begin()
        self._memory.forget()
        if func is _BACKWARD:
            self._memory.convolution_backward(asked, func, args, result)  # type: ignore[arg-type]
        elif func in _RECURRENT:
            self._memory.add([rnn.workspace(_RECURRENT[func](args))])
        elif (observe := self._observers.get(func)) is not None:
            observe(asked, func, args, kwargs, result)  # type: ignore[arg-type]
        kept = sum(nbytes for nbytes, _ in asked.alive.values())
        return CallMemory(asked.expected - kept, asked.high - kept, kept)


class _Asked:
    """Takes the place of a capture's state and recorder, and sums up requests."""

    device_type = "cuda"
    stream = 0

    def __init__(self) -> None:
        self.recorder = self
        self.kernels: Counter[tuple[str, str, str]] = Counter()
        self.begin()

    def begin(self) -> None:
        self.expected = self.high = 0
        self.alive: dict[int, tuple[int, int]] = {}
        self._count = 0

    def device_number(self, device: torch.device) -> int:
        return device.index or 0

    def scratch(self, _low: int, nbytes: int, high: int, _device: int, *, name: str) -> int:
        self._count += 1
        self.alive[self._count] = nbytes, high
        expected, most = map(sum, zip(*self.alive.values(), strict=True))
        self.expected, self.high = max(self.expected, expected), max(self.high, most)
        return self._count

    def release(self, number: int, *_sizes: int) -> None:
        del self.alive[number]

    def record(self, _result: Any) -> int:
        return 0

    def mark(self, _kind: Any) -> None:
        pass
