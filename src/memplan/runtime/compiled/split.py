"""Splits an op on lists of tensors into one for each tensor, where that changes no bit.

On the CPU a foreach op has no kernel of its own: it calls the plain op on one tensor after the
other, so lists of one give the same bits. The fused optimizers' CPU kernels loop in the same way.
"""

from __future__ import annotations

from typing import Any

import torch

_TOGETHER = ("_foreach_max", "_amp_foreach_non_finite_check_and_unscale_")
"""They also compute something of the whole list."""
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def pieces(
    func: Any, args: tuple[Any, ...], mapped: list[Any], mapped_kwargs: dict[str, Any]
) -> list[tuple[list[Any], dict[str, Any]]] | None:
    """Arguments for each tensor of the lists, made from `mapped`; None: it stays as it is."""
    name: str = func._opname
    if func.namespace != "aten" or not name.startswith(("_foreach_", *_FUSED)):
        return None
    lists = [a for a in args if isinstance(a, (list, tuple)) and _of_tensors(a)]
    count = len(lists[0]) if lists else 0
    if name in _TOGETHER or count < 2 or any(len(one) != count for one in lists):
        return None
    if any(tensor.device.type != "cpu" for one in lists for tensor in one):
        return None
    if any(isinstance(argument, torch.Tensor) and argument.dim() for argument in args):
        return None  # a number for each tensor, as a tensor
    return [
        (
            [_part(argument, count, number) for argument in mapped],
            {key: _part(value, count, number) for key, value in mapped_kwargs.items()},
        )
        for number in range(count)
    ]


def _of_tensors(values: Any) -> bool:
    return len(values) > 0 and all(isinstance(value, torch.Tensor) for value in values)


def _part(argument: Any, count: int, number: int) -> Any:
    """The piece of a list of the tensors' length; other arguments serve every piece."""
    if isinstance(argument, list) and len(argument) == count:
        return [argument[number]]
    return argument
