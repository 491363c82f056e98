"""What a head's logits are reduced to, a chunk of rows at a time.

Row i of the result depends on row i of the head's input alone, so neither the logits nor their
gradient ever need to exist whole: forward keeps the head's input, and backward computes each chunk
of logits again. Wijmans et al. (2024), "Cut Your Losses in Large-Vocabulary Language Models", and
Hsu et al. (2024), "Liger Kernel", do the same in kernels of their own; here PyTorch's own kernels
run on chunks. What changes is the order of sums in the gradients of the weight and the bias, and
the kernels that PyTorch's libraries choose for other numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

linear = torch.nn.functional.linear
"""The function itself, before the lever takes its place."""
RowWise = Callable[[Tensor], Tensor]
"""Logits `[rows, classes]` to a tensor of the same shape, each row by itself."""
Reduction = Callable[..., Tensor]
"""Logits and further tensors, all with as many rows, to a tensor with that many rows."""


class Autocast:
    """Autocast as it is now, to be had again: backward runs in a thread of its own."""

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self.enabled = torch.is_autocast_enabled(self._kind)
        self.dtype = torch.get_autocast_dtype(self._kind)

    def again(self) -> torch.autocast:
        return torch.autocast(self._kind, self.dtype, self.enabled, cache_enabled=False)


class Head:
    """A linear layer as it was called: weight `[classes, features]`, bias, autocast."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows_of_chunk: int) -> None:
        self.weight = weight
        self.bias = bias
        self.rows_of_chunk = rows_of_chunk
        self.autocast = Autocast(weight.device)


def reduce_rows(
    head: Head, row_wise: RowWise, reduction: Reduction, features: Tensor, *others: Tensor
) -> Tensor:
    """`reduction(row_wise(linear(features)), *others)`, with gradients for the features and the
    head. `features`: `[rows, features]`; `others`: `[rows, …]`, without gradients."""
    result: Tensor = _Reduce.apply(  # type: ignore[no-untyped-call]
        head, row_wise, reduction, features, head.weight, head.bias, *others
    )
    return result


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        head, row_wise, reduction, features, weight, bias, *others = given
        ctx.save_for_backward(features, weight, bias, *others)
        ctx.of = head, row_wise, reduction
        results = []
        weight, bias = _cast(head, weight), _cast(head, bias)
        for chunk, *rest in _chunks(head, features, *others):
            logits = _linear(head, chunk, weight, bias)
            results.append(reduction(row_wise(logits), *rest))
            del logits
        return torch.cat(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, *others = ctx.saved_tensors
        head, row_wise, reduction = ctx.of
        needs = ctx.needs_input_grad[3:6]
        of_features = torch.empty_like(features) if needs[0] else None
        of_weight = torch.zeros_like(weight) if needs[1] else None
        of_bias = torch.zeros_like(bias) if needs[2] else None
        used, used_bias = _cast(head, weight), _cast(head, bias)
        at = 0
        for chunk, of_result, *rest in _chunks(head, features, gradient, *others):
            logits = _linear(head, chunk, used, used_bias)
            with torch.enable_grad():
                result = reduction(row_wise(logits.requires_grad_()), *rest)
            (of_logits,) = torch.autograd.grad(result, logits, of_result)
            del logits, result
            with torch.autocast(weight.device.type, enabled=False):
                chunk = chunk.to(of_logits.dtype)
                if of_features is not None:
                    of_features[at : at + len(chunk)] = of_logits @ used
                if of_weight is not None and of_weight.dtype == of_logits.dtype:
                    of_weight.addmm_(of_logits.t(), chunk)
                elif of_weight is not None:
                    of_weight += of_logits.t() @ chunk
                if of_bias is not None:
                    of_bias += of_logits.sum(0)
            at += len(chunk)
            del of_logits
        return (None, None, None, of_features, of_weight, of_bias, *(None for _ in others))


def _linear(head: Head, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with head.autocast.again():
        return linear(features, weight, bias)


def _cast(head: Head, tensor: Any) -> Any:
    """A weight in the dtype that `linear` computes in, cast once for all chunks."""
    autocast = head.autocast
    if tensor is None or not autocast.enabled or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(autocast.dtype)


def _chunks(head: Head, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(head.rows_of_chunk) for tensor in tensors), strict=True))
