"""Operators without a shape rule: a small run on the host gives the shapes of their results."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from memplan.capturing.state import CaptureState

aten = torch.ops.aten

_MAX_BYTES = 64 << 20


def run_on_host(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """Fake results of an operator for which PyTorch has no shape rule.

    An operator that only writes to its arguments returns those. Any other runs on the CPU, on known
    or made-up values, if they are small. Returns NotImplemented if neither is possible.
    """
    returns = func._schema.returns
    if not returns:
        return None
    if any(str(item.type) not in ("Tensor", "List[Tensor]") for item in returns):
        return NotImplemented
    flat = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, FakeTensor)]
    nbytes = sum(item.numel() * item.element_size() for item in flat)
    if not flat or nbytes > _MAX_BYTES or func._schema.is_mutable:
        return NotImplemented

    def real(item: Any) -> Any:
        if isinstance(item, FakeTensor):
            value = state.values.of(item)
            return _made_up(item) if value is None else value
        return torch.device("cpu") if isinstance(item, torch.device) else item

    host_args, host_kwargs = pytree.tree_map(real, (args, kwargs))
    try:
        result = func(*host_args, **host_kwargs)
    except (RuntimeError, NotImplementedError):
        return NotImplemented
    state.assume(
        "shape",
        "the result's shape was learnt from a run on the host with made-up values",
        op=str(func),
    )
    device = flat[0].fake_device

    def fake(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        state.refuse_sparse(item)
        return state.blank(item.size(), item.dtype, device, item.stride())

    return pytree.tree_map(fake, result)


def _made_up(tensor: FakeTensor) -> torch.Tensor:
    """Made-up values that no decomposition or solver fails on: square matrices are invertible."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    value = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor.dtype)
    if tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2]:
        value = value + tensor.shape[-1] * torch.eye(tensor.shape[-1], dtype=tensor.dtype)
    return value
