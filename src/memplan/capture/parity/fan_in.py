"""Undoes what a dispatch mode itself changes about autograd: gradient fan-in.

Where several gradients meet, the engine adds the new one into the buffered one in place if nobody
else holds it, but never does so for a tensor subclass (`can_accumulate_inplace` in PyTorch's
`torch/csrc/autograd/input_buffer.cpp`). Under capture every such addition therefore asks for a new
tensor that the real run does not. Here the engine's own additions are recognised and, under the
same condition, done in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_ENGINE = "_engine_run_backward"


class FanIn:
    """Recognises the engine's additions and decides whether they happen in place."""

    def __init__(self) -> None:
        self.unshared: tuple[int, int, int] | None = None
        """Reference counts of a tensor that PyTorch itself holds once and nobody else."""
        self.product: tuple[int, int] | None = None
        """The storage of the last matrix product, and the row of the op that gave it its shape."""
        self._seen: list[tuple[int, int, int]] | None = None

    def calibrate(self, backward: Callable[[], None]) -> None:
        """Learn the reference counts of a gradient that only the engine's buffer holds.

        `backward` runs a backward pass with a fan-in of fresh gradients. The counts depend on how
        PyTorch hands arguments to Python, so they are measured and not written down.
        """
        self._seen = []
        backward()
        if self._seen:
            self.unshared = self._seen[0]
        self._seen = None

    def reuse(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> FakeTensor | None:
        """The operand that receives the sum, or None when this is an ordinary addition."""
        if kwargs or torch._C._current_graph_task_id() == -1:
            return None
        if torch.is_grad_enabled() or not called_by_engine(frame):
            return None
        left, right = args[0], args[1]
        if not isinstance(left, FakeTensor) or not isinstance(right, FakeTensor):
            return None
        if left.shape != right.shape or left.dtype != right.dtype:
            return None
        counts = reference_counts(left)  # the buffered one; the engine tries no other
        if self._seen is not None:
            self._seen.append(counts)
        elif counts == self.unshared and _non_overlapping_and_dense(left):
            return left
        return None


def reference_counts(tensor: FakeTensor) -> tuple[int, int, int]:
    """C++ references to the tensor and to its storage, and Python's, seen from inside a dispatch.

    All of Python's together are one of C++'s, which the dispatch itself holds too.
    """
    return (
        tensor._use_count(),  # type: ignore[attr-defined]
        torch._C._storage_Use_Count(tensor.untyped_storage()._cdata),
        sys.getrefcount(tensor),
    )


def called_by_engine(frame: FrameType | None) -> bool:
    """Whether an operator was called by the engine itself and not by a Python backward.

    On a device thread of the engine there is no Python frame below; for a CPU graph the engine
    runs in the caller's thread, below `_engine_run_backward`.
    """
    return frame is None or frame.f_code.co_name == _ENGINE


def _non_overlapping_and_dense(tensor: FakeTensor) -> bool:
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
