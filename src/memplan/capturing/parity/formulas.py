"""Undoes what a dispatch mode itself changes about PyTorch's formulas of derivatives.

Several of them write into a tensor that they have just made, but under a mode, or for a tensor
subclass, ask for another one each time (`areAnyTensorSubclassLike` in PyTorch's
`torch/csrc/autograd/FunctionsManual.cpp` and `native/TensorAdvancedIndexing.cpp`). Under capture
the backward of `gather`, `topk`, `x[rows]`, and of what reduces to chosen elements would hold their
input's size twice. Here the engine's own calls are recognised and answered in place.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.operators.data_dependent import masked_index
from memplan.capturing.operators.fake import run_fake
from memplan.capturing.parity.additions import called_by_engine
from memplan.capturing.state import CaptureState, Handler

aten = torch.ops.aten

_INTO_ZEROS = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
}
_OF_LOGITS = {
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
}
_LOGITS_NODE = "BinaryCrossEntropyWithLogitsBackward0"
_OWN = "memplan.capturing."


def into_zeros(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """What scatters gradients into zeros that the formula made just before."""
    if _is_formula(state, args[0]):
        func = _INTO_ZEROS[func]
        if func is not aten.index_put_.default:
            return run_fake(state, func, args, kwargs)
        result = masked_index(state, func, args, kwargs)
        return run_fake(state, func, args, kwargs) if result is NotImplemented else result
    return masked_index(state, func, args, kwargs) if func is aten.index_put.default else _ORDINARY


def of_logits(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """The chain of `binary_cross_entropy_with_logits`, which goes on in one tensor."""
    if torch._C._current_graph_task_id() == -1 or kwargs or not _is_formula(state, args[0]):
        return _ORDINARY
    node = torch._C._current_autograd_node()
    if node is None or node.name() != _LOGITS_NODE:
        return _ORDINARY
    return run_fake(state, _OF_LOGITS[func], args, kwargs)


_ORDINARY = NotImplemented


def _is_formula(state: CaptureState, target: Any) -> bool:
    """Whether the engine calls, with the storage that was made last."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    if not isinstance(target, FakeTensor):
        return False
    newest = state.recorder.builder.newest_storage
    return state.number_of(target) == newest and called_by_engine(_caller())


def _caller() -> FrameType | None:
    """The first frame that is not the capture's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_OWN):
        frame = frame.f_back
    return frame


HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(_INTO_ZEROS, into_zeros),
    **dict.fromkeys(_OF_LOGITS, of_logits),
}
