"""A tensor as the card's tensor memory accelerator takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class TensorDescriptor:
    """Lives on the host, and keeps its tensor."""

    base: torch.Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    @staticmethod
    def from_tensor(
        tensor: torch.Tensor, block_shape: Sequence[int], *more: Any, **named: Any
    ) -> TensorDescriptor:
        return TensorDescriptor(tensor, tensor.shape, tensor.stride(), block_shape, *more, **named)
