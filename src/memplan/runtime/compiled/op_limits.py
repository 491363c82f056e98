"""What a graph may and may not hold of an op, and what is known of it."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils.flop_counter import flop_registry

from memplan.runtime.compiled.lines import refused_at
from memplan.runtime.compiled.not_capturable import NotCapturable

aten = torch.ops.aten
ITEM = aten._local_scalar_dense.default
PACK = aten._pack_padded_sequence.default
"""The lengths, its second argument, decide on the shapes of its results."""
KNOWN = frozenset({"aten", "prims", "prim", "torchvision"})
HIDDEN_STATE = frozenset({"_cudnn_rnn", "miopen_rnn"})
"""They advance a dropout state that their schema does not show as written."""


def current_stream() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def value_of(tensor: torch.Tensor) -> Any:
    """Of one element. A fake tensor has none: what is computed from it serves sizes alone."""
    try:
        return ITEM(tensor)
    except DataDependentOutputException:
        return torch.ones((), dtype=tensor.dtype).item()


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


SHAPE_ONLY = frozenset(
    {
        "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full",
        "new_empty", "new_empty_strided",
    }
)  # fmt: skip
"""Ops that read of their argument only how it lies."""


_UNTAGGED = frozenset({"nms", "_pack_padded_sequence"})
"""The shapes of their results depend on values, though PyTorch has no tag that says so."""
_BY_VALUES = {"prod": 0, "masked_fill": 2, "masked_fill_": 2}
"""Arguments whose gradient depends on values for its way to be computed (are there zeros?), and is
computed in yet another way under a dispatch mode."""


def check_supported(func: Any) -> None:
    if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        raise NotCapturable(f"communication between processes ({func})", refused_at())
    if func.namespace == "aten" and func._opname in ("resize_", "resize_as_", "_resize_output_"):
        raise NotCapturable("a tensor whose storage is resized", refused_at())


def check_values(func: Any, args: tuple[Any, ...]) -> None:
    """Of an op on what differs between steps."""
    dynamic = torch.Tag.dynamic_output_shape in func.tags or func._opname in _UNTAGGED
    if dynamic and not _by_numbers(func, args):
        raise NotCapturable(
            f"a result whose shape depends on values ({func})",
            refused_at(),
            "use torch.where or a mask in place of it",
        )
    if torch.is_grad_enabled() and _has_gradient_by_values(func, args):
        raise NotCapturable(
            f"the gradient of {func._opname}(), whose operators depend on values",
            refused_at(),
            "torch.where in place of masked_fill, a sum of logarithms in place of prod",
        )
    if torch.Tag.data_dependent_output in func.tags and func is not ITEM:
        raise NotCapturable(f"a Python value computed from tensors ({func})", refused_at())


def _has_gradient_by_values(func: Any, args: tuple[Any, ...]) -> bool:
    place = _BY_VALUES.get(func._opname, len(args))
    given = args[place] if place < len(args) else None
    return isinstance(given, torch.Tensor) and given.requires_grad


def _by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is an indexing by numbers: only one by a mask has a shape that depends on it."""
    return func is aten.index.Tensor and not any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in args[1]
    )
