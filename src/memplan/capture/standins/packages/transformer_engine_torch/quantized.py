"""Tensors of a quantizer: what the extension allocates for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memplan.capture.standins.rules import Call
from memplan.types.errors import CaptureError


def shape_of(tensor: Any) -> torch.Size:
    """Of the numbers that a tensor stands for."""
    return torch.Size(tensor.size())


def dtype_of(tensor: Any) -> torch.dtype:
    """Of the stored numbers."""
    found: torch.dtype = tensor.dtype
    return found


def create(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """An empty tensor as the quantizer makes it."""
    if quantizer is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    raise CaptureError(f"{type(quantizer).__name__} cannot be captured", "train in bf16")


def writes_directly(quantizer: Any, kernel: str) -> bool:
    """Whether a kernel writes what the quantizer makes, without a result in high precision."""
    del kernel
    return quantizer is None


def is_fused_output(quantizer: Any, a: Any, b: Any) -> bool:
    """Whether a product is written quantised at once."""
    return False


def quantize_into(call: Call, source: torch.Tensor, quantizer: Any, out: Any) -> None:
    """Quantise a tensor."""
