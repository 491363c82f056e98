"""What a recording on a real CUDA device heeds beside the ops: streams, and tensors from data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def current_stream() -> int:
    """The current device's current stream, as the driver knows it."""
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))


@contextmanager
def tensors_made_as_in_captures() -> Iterator[None]:
    """`torch.tensor(data, device="cuda")` shows its copy to the device as an op, as it does where
    the device is a fake one: a plan counts the ops there."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
