"""The fake mode of a capture."""

from __future__ import annotations

import threading
from typing import Any

import torch

from memplan.capture.fake.fast_fake import FastFakeMode


class DeviceFakeMode(FastFakeMode):
    """A fake mode that never asks whether there is a real device, for several threads. Its tensors
    are of PyTorch's own classes (`capture/fake/plain_class.py`)."""

    tensor_class = torch.Tensor

    def __init__(self) -> None:
        self._thread = threading.local()
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    @property
    def avoid_device_init(self) -> bool:
        return True

    @property
    def in_kernel_invocation(self) -> bool:
        """A fake tensor says that it is on `meta` in the thread whose kernel runs, only there."""
        return getattr(self._thread, "in_kernel", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._thread.in_kernel = value

    def __deepcopy__(self, _memo: Any) -> DeviceFakeMode:
        return self  # every copy of a fake tensor carries its mode along
