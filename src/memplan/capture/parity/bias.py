"""Undoes what a dispatch mode itself changes about `linear`: its bias.

For an input that is not contiguous `linear` multiplies first and then adds the bias, into the
product; under a mode, or for a tensor subclass, it asks for another tensor (`isTensorSubclassLike`
in PyTorch's `native/Linear.cpp`). Attention without a fused kernel adds its mask in the same way
(`native/transformers/attention.cpp`). Here such an addition is recognised by what PyTorch itself
calls with a product that nobody else holds, and answered in place.
`runtime/tape/recording` does the same where a plan recomputes: a plan counts operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capture.mode import CaptureMode, Handler, Observer
from memplan.capture.parity.fan_in import reference_counts

aten = torch.ops.aten


def note_product(
    mode: CaptureMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    """`matmul` gives its product its shape last."""
    mode.fan_in.product = mode.number_of(result), mode.recorder.builder.op


def into_product(
    mode: CaptureMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The product itself, with the bias added; NotImplemented for any other addition."""
    left, product = args[0], mode.fan_in.product
    if product is None or product[1] != mode.recorder.builder.op or kwargs:
        return NotImplemented
    if not isinstance(left, FakeTensor) or not isinstance(args[1], torch.Tensor):
        return NotImplemented
    if mode.number_of(left) != product[0]:
        return NotImplemented
    cpp, *others = reference_counts(left)  # asked for here: a frame more would hold it too
    cpp += torch.is_inference_mode_enabled()  # there no layer of autograd holds it
    if (cpp, *others) != mode.fan_in.unshared or not fits_into(left, args[1]):
        return NotImplemented
    mode.fake(aten.add_.Tensor, args, kwargs)
    # Autograd takes what an addition gives for a tensor of its own.
    return mode.fake_mode.dispatch(aten.alias.default, (), (left,), {})


def fits_into(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the sum has the shape and the type of `left`."""
    if torch.result_type(left, right) != left.dtype:
        return False
    return bool(torch.broadcast_shapes(left.shape, right.shape) == left.shape)


HANDLERS: dict[Any, Handler] = {aten.add.Tensor: into_product}
OBSERVERS: dict[Any, Observer] = {aten._unsafe_view.default: note_product}
