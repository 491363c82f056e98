"""Memory that an operator of a graph allocates beside its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.utils import _pytree as pytree

from memplan.capturing.operators.call_memory import NOTHING, CallMemory, CallRules
from memplan.runtime.card import profile_of

_NUMBER_BYTES = 8
_THREADS = 2
"""Threads with workspaces of their own: the caller's, which runs forward and compiled steps, and
autograd's, which runs backward and did so before a compilation."""


def call_memory(
    node: fx.Node, laid_out: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list
) -> CallMemory:
    """What a node allocates beside its results, if it calls an operator of PyTorch's.

    On CUDA the rules for this process's card apply (docs/kernels.md). On the host only Python
    numbers are counted, which become tensors where an operator wants one; what kernels allocate
    there is not known. `laid_out` gives the operator's tensors with the strides of the call.
    """
    target, given = _called(node)
    if not isinstance(target, torch._ops.OpOverload):
        return NOTHING
    result = node.meta.get("val")
    known = fx.map_arg((given, node.kwargs), lambda needed: needed.meta.get("val"))
    device = _device([known, result])
    if device is not None and device.type == "cuda":
        leaves, spec = pytree.tree_flatten(known)
        tensors = iter(laid_out([one for one in leaves if isinstance(one, torch.Tensor)]))
        lie = [next(tensors) if isinstance(one, torch.Tensor) else one for one in leaves]
        args, kwargs = pytree.tree_unflatten(lie, spec)
        return _rules(device)(target, tuple(args), dict(kwargs), result)
    if not isinstance(result, torch.Tensor) or result.device.type not in ("cpu", "meta"):
        return NOTHING
    wanted = zip(target._schema.arguments, node.args, strict=False)
    numbers = sum(
        isinstance(argument.type, torch.TensorType) and _is_number(one) for argument, one in wanted
    )
    return CallMemory(_NUMBER_BYTES * numbers, _NUMBER_BYTES * numbers)


def kept_workspaces(calls: Iterable[CallMemory]) -> list[int]:
    """Blocks, in bytes, that libraries keep once these calls have run."""
    return [max((one.kept for one in calls), default=0)] * _THREADS


def on_cuda(node: fx.Node) -> bool:
    """Whether a node's result has a CUDA tensor."""
    device = _device(node.meta.get("val"))
    return device is not None and device.type == "cuda"


def _called(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """A node's operator and arguments, also where a random wrapper has them as its arguments."""
    if node.target is run_and_save_rng_state:
        return node.args[0], node.args[1:]
    if node.target is run_with_rng_state:
        return node.args[1], node.args[2:]
    return node.target, node.args


def _device(values: Any) -> torch.device | None:
    """The device of tensors: a GPU if one is among them, because numbers may be on the host."""
    devices = [one.device for one in pytree.tree_leaves(values) if isinstance(one, torch.Tensor)]
    return next((one for one in devices if one.type == "cuda"), devices[0] if devices else None)


def _rules(device: torch.device) -> CallRules:
    profile = profile_of(device)
    key = profile.name, profile.capability, profile.sm_count
    if key not in _known:
        _known[key] = CallRules(profile)
    return _known[key]


_known: dict[Any, CallRules] = {}


def _is_number(given: Any) -> bool:
    if isinstance(given, fx.Node):
        return not isinstance(given.meta.get("val"), torch.Tensor)
    return isinstance(given, (int, float))
