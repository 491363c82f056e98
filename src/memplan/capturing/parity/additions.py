"""Additions that PyTorch does in place, and under a dispatch mode out of place.

Where several gradients meet, the engine adds the new one into the buffered one if nobody else holds
it (`can_accumulate_inplace` in PyTorch's `torch/csrc/autograd/input_buffer.cpp`). For an input that
is not contiguous `linear` multiplies first and then adds the bias into the product
(`isTensorSubclassLike` in `native/Linear.cpp`), and attention without a fused kernel adds its mask
in the same way (`native/transformers/attention.cpp`). Under capture each of them asks for a new
tensor that the real run does not. They are recognised here by who calls, and by nobody else holding
the operand, and done in place. `runtime/tape/bias` does the same where a plan recomputes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.operators.fake import run_fake
from memplan.capturing.state import CaptureState, Handler, Observer

aten = torch.ops.aten

_ENGINE = "_engine_run_backward"


class InPlaceAdditions:
    """Recognises additions that PyTorch itself makes, and decides whether they happen in place."""

    def __init__(self) -> None:
        self._unshared: tuple[int, int, int] | None = None
        """Reference counts of a tensor that PyTorch itself holds once and nobody else."""
        self._product: tuple[int, int] | None = None
        """The storage of the last matrix product, and the row of the op that gave it its shape."""
        self._seen: list[tuple[int, int, int]] | None = None

    def handlers(self) -> dict[Any, Handler]:
        return {aten.add.Tensor: self._into_product}

    def observers(self) -> dict[Any, Observer]:
        return {aten._unsafe_view.default: self._note_product}

    def calibrate(self, backward: Callable[[], None]) -> None:
        """Learn the reference counts of a gradient that only the engine's buffer holds.

        `backward` runs a backward pass with a fan-in of fresh gradients. The counts depend on how
        PyTorch hands arguments to Python, so they are measured and not written down.
        """
        self._seen = []
        backward()
        if self._seen:
            self._unshared = self._seen[0]
        self._seen = None

    def gradient_buffer(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None
    ) -> FakeTensor | None:
        """The gradient that receives a sum of the engine's; None for any other addition."""
        if kwargs or torch._C._current_graph_task_id() == -1:
            return None
        if torch.is_grad_enabled() or not called_by_engine(frame):
            return None
        left, right = args[0], args[1]
        if not isinstance(left, FakeTensor) or not isinstance(right, FakeTensor):
            return None
        if left.shape != right.shape or left.dtype != right.dtype:
            return None
        counts = _reference_counts(left)  # the buffered one; the engine tries no other
        if self._seen is not None:
            self._seen.append(counts)
        elif counts == self._unshared and _non_overlapping_and_dense(left):
            return left
        return None

    def _note_product(
        self,
        state: CaptureState,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """`matmul` gives its product its shape last."""
        self._product = state.number_of(result), state.recorder.builder.op

    def _into_product(
        self, state: CaptureState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The product itself, with the bias added; NotImplemented for any other addition."""
        left, product = args[0], self._product
        if product is None or product[1] != state.recorder.builder.op or kwargs:
            return NotImplemented
        if not isinstance(left, FakeTensor) or not isinstance(args[1], torch.Tensor):
            return NotImplemented
        if state.number_of(left) != product[0]:
            return NotImplemented
        cpp, *others = _reference_counts(left)  # asked for here: a frame more would hold it too
        cpp += torch.is_inference_mode_enabled()  # there no layer of autograd holds it
        if (cpp, *others) != self._unshared or not _fits_into(left, args[1]):
            return NotImplemented
        run_fake(state, aten.add_.Tensor, args, kwargs)
        # Autograd takes what an addition gives for a tensor of its own.
        return state.fake_mode.dispatch(aten.alias.default, (), (left,), {})


def _reference_counts(tensor: FakeTensor) -> tuple[int, int, int]:
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


def _fits_into(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the sum has the shape and the type of `left`."""
    if torch.result_type(left, right) != left.dtype:
        return False
    return bool(torch.broadcast_shapes(left.shape, right.shape) == left.shape)


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
