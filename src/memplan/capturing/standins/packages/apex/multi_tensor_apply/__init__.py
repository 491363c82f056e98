"""Kernels over lists of tensors: they write to what they are given."""

from __future__ import annotations

from typing import Any

from memplan.capturing.standins.launch import record


class MultiTensorApply:
    """Calls a kernel in chunks."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *_args: Any) -> None:
        tensors = [tensor for tensors in tensor_lists for tensor in tensors]
        record(f"apex.{getattr(op, '__name__', 'multi_tensor')}", tensors, tensors)


multi_tensor_applier = MultiTensorApply(2048 * 32)
