"""Sizes, strides and dtypes of results that PyTorch's shape functions get wrong.

Some kernels pass a workspace from forward to backward whose size a library chooses (recurrent cells
of oneDNN and cuDNN); the shape function says that it is empty. And where operands are not
contiguous, a result may have other strides than the shape function says: a batch norm on the CPU
returns a contiguous result, so that a later `reshape` is a view in place of a copy, or the other
way round. Where operands have several dtypes, as norms have under autocast, the CPU's kernels keep
statistics in float32, of which the shape function says that they have the input's dtype. On the CPU
such an operator is run on zeros, once for each set of shapes. The size of cuDNN's workspace comes
from a rule; its upper end is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.utils import preserve_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from memplan.capturing.kernels import rnn
from memplan.capturing.operators.recurrent import forward_call

_RESERVE = 3
"""Index of the workspace among the results of `_cudnn_rnn`."""
_results_of: dict[Any, list[torch.Tensor | None]] = {}
"""Results by operator and operands, as meta tensors."""


def is_symbolic(value: Any) -> bool:
    """Whether a value is a symbolic number, or a tensor with a symbolic size."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def workspace_bytes(node: fx.Node, place: int) -> int:
    """Bytes of a result that the shape function says is empty; 0 where they are not known."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    arguments = fx.map_arg((node.args, node.kwargs), lambda needed: needed.meta.get("val"))
    if node.target is torch.ops.aten._cudnn_rnn.default and place == _RESERVE:
        return rnn.reserve(forward_call(arguments[0])).high
    leaves, spec = pytree.tree_flatten(arguments)
    found = _results(node.target, leaves, spec)
    one = found[place] if place < len(found) else None
    return 0 if one is None else one.untyped_storage().nbytes()


@contextmanager
def real_layouts() -> Iterator[None]:
    """Inside, fake results on the CPU have the strides and dtypes that operators give them when
    they run. For traces without symbolic sizes."""
    dispatch = FakeTensorMode.dispatch

    def dispatched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = dispatch(mode, func, types, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        if not _may_have_another_layout(func, leaves):
            return result
        several, of = pytree.tree_flatten(result)
        for place, real in enumerate(_results(func, leaves, spec)):
            fake = several[place]
            if real is None or fake.shape != real.shape:
                continue
            if (fake.stride(), fake.dtype) != (real.stride(), real.dtype):
                like = {"dtype": real.dtype, "device": fake.device}
                with mode:
                    several[place] = torch.empty_strided(real.shape, real.stride(), **like)
        return pytree.tree_unflatten(several, of)

    with mock.patch.object(FakeTensorMode, "dispatch", dispatched):
        yield


def _may_have_another_layout(func: Any, leaves: list[Any]) -> bool:
    """Whether a result may have other strides or another dtype than the shape function says: some
    operand is not contiguous, or operands differ in their dtype. For pointwise operators PyTorch is
    right. Operators that take indices or a library's workspace cannot be run on zeros."""
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return (
        not any(map(is_symbolic, leaves))
        and func.namespace == "aten"
        and not func.is_view
        and not func._schema.is_mutable
        and torch.Tag.pointwise not in func.tags
        and all(one.is_floating_point() and one.numel() for one in given)
        and not (all(one.is_contiguous() for one in given) and len({g.dtype for g in given}) == 1)
    )


def _results(target: Any, leaves: list[Any], spec: Any) -> list[torch.Tensor | None]:
    """The results of an operator on the CPU, as meta tensors; empty where they are not known."""
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(map(is_symbolic, leaves)) or any(one.device.type != "cpu" for one in given):
        return []
    if not any(one.numel() for one in given):
        return []
    key = (target, str(spec), *map(_key, leaves))
    if key not in _results_of:
        _results_of[key] = _run_on_zeros(target, leaves, spec)
    return _results_of[key]


def _key(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return tuple(leaf.shape), leaf.stride(), leaf.dtype


def _run_on_zeros(target: Any, leaves: list[Any], spec: Any) -> list[torch.Tensor | None]:
    below = torch._C._AutoDispatchBelowAutograd
    # With gradients enabled, as in forward: some kernels omit the workspace otherwise.
    with _disable_current_modes(), torch.enable_grad(), below(), preserve_rng_state():
        try:
            args, kwargs = pytree.tree_unflatten(list(map(_zeros, leaves)), spec)
            results = target(*args, **kwargs)
        except Exception:
            return []
        return [_as_meta(one) for one in pytree.tree_leaves(results)]


def _as_meta(one: Any) -> torch.Tensor | None:
    if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
        return None
    held = torch.empty(one.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
    same = torch.empty(0, dtype=one.dtype, device="meta")
    return same.set_(held.untyped_storage(), 0, one.shape, one.stride())


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()
