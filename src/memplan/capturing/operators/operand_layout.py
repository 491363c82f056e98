"""The memory formats that CUDA kernels need, and the copies of operands with another one.

The operators of the fake device are those of a PyTorch without CUDA, which accepts operands in any
format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memplan.capturing.kernels.cudnn_norm import BatchNorm, batch_norm_backend
from memplan.capturing.kernels.model import Scratch, exactly
from memplan.capturing.patches.attributes import Patches

aten = torch.ops.aten

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in channels-last format, and not contiguous as well."""
    last = _LAST.get(tensor.dim())
    return (
        last is not None and tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous()
    )


def convolution_layout(x: torch.Tensor, w: torch.Tensor, _backend: Any) -> torch.memory_format:
    """The memory format of a convolution's results on CUDA: channels last where the input or the
    weight is (`cudnn_conv_suggest_memory_format` in `native/ConvUtils.h`). A PyTorch without CUDA
    says that every result is contiguous."""
    if torch.float64 in (x.dtype, w.dtype) or not (_suggests_last(x) or _suggests_last(w)):
        return torch.contiguous_format
    return _LAST[w.dim()]


def copies(layout: torch.memory_format, tensors: Sequence[torch.Tensor]) -> list[Scratch]:
    """The copies that a kernel makes while it runs, to have tensors in a memory format."""
    return [
        exactly("operand's copy", tensor.numel() * tensor.element_size())
        for tensor in tensors
        if not tensor.is_contiguous(memory_format=layout)
    ]


def batch_norm_call(x: torch.Tensor, weight: torch.Tensor | None, training: bool) -> BatchNorm:
    return BatchNorm(
        shape=tuple(x.shape),
        dtype=dtype_name(x),
        weight_dtype=None if weight is None else dtype_name(weight),
        training=training,
        channels_last=channels_last(x),
        cudnn_enabled=bool(torch.backends.cudnn.enabled),
    )


def install(patches: Patches) -> torch.library.Library:
    """Register below autograd's key for CUDA; the library must stay alive."""
    patches.set(torch._C, "_conv_determine_backend_memory_format", convolution_layout)
    library = torch.library.Library("aten", "IMPL")
    library.impl("batch_norm", _batch_norm, "AutogradCUDA")
    return library


def suggested_layout(tensor: torch.Tensor) -> torch.memory_format:
    """`Tensor.suggest_memory_format` of C++."""
    return _LAST[tensor.dim()] if _suggests_last(tensor) else torch.contiguous_format


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    *others: Any,
) -> Any:
    """A batch norm with cuDNN, which copies its input if that is not contiguous; backward keeps the
    copy (`_batch_norm_impl_index` in `native/Normalization.cpp`)."""
    if batch_norm_backend(batch_norm_call(x, weight, training)) == "cudnn":
        x = x.contiguous(memory_format=suggested_layout(x))
    results = aten._batch_norm_impl_index(x, weight, bias, mean, variance, training, *others)
    return results[0]


def _suggests_last(tensor: torch.Tensor) -> bool:
    """`is_channels_last_strides_2d` of `c10/core/MemoryFormat.h`: a weight of 1 by 1 that was
    converted to channels last counts, too, although its memory is the same."""
    shape, stride = tensor.shape, tensor.stride()
    if tensor.dim() not in _LAST or not stride[1]:
        return False
    least = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        if not shape[dim] or stride[dim] < least or (dim == 0 and least == stride[1]):
            return False
        least = stride[dim] * max(shape[dim], 1)
    return True
