"""Losses that are one number, but keep the memory of the values that were reduced to it.

PyTorch's kernels allocate a result of the inputs' shape and make it one number afterwards
(`resize_`), on the CPU and on CUDA (`Loss.cpp`, `BinaryOps.cpp`, `cuda/Loss.cu`). PyTorch's shape
functions say that the result has the memory of one number.
"""

from __future__ import annotations

from typing import Any

import torch

_NAMES = ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
_KEEPING = frozenset(getattr(torch.ops.aten, name).default for name in _NAMES)


def kept_bytes(func: Any, args: Any, result: Any) -> int:
    """Bytes of the storage of such a loss; 0 for any other result."""
    if func not in _KEEPING or result.dim():
        return 0
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return int(shape.numel()) * int(result.element_size())
