"""Sizes of results that PyTorch's shape functions do not know.

Some kernels hand a workspace from forward to backward whose size their library chooses (oneDNN's
recurrent cells, cuDNN's); a shape function says that it is empty. On the CPU such an operator is
run, once for each set of shapes, on zeros; cuDNN's reserve has a rule, whose upper end counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import preserve_rng_state
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from memplan.capturing.kernels import rnn
from memplan.capturing.operators.recurrent import forward_call

_RESERVE = 3
"""Place among the results of `_cudnn_rnn`."""
_known: dict[Any, list[int]] = {}


def workspace_bytes(node: fx.Node, place: int) -> int:
    """What an empty result of an operator needs in truth; 0 where that is not known."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    arguments = fx.map_arg((node.args, node.kwargs), lambda needed: needed.meta.get("val"))
    if node.target is torch.ops.aten._cudnn_rnn.default and place == _RESERVE:
        return rnn.reserve(forward_call(arguments[0])).high
    leaves, spec = pytree.tree_flatten(arguments)
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not any(one.numel() for one in given) or any(one.device.type != "cpu" for one in given):
        return 0
    key = (node.target, str(spec), *map(_like, leaves))
    if key not in _known:
        _known[key] = _measured(node.target, leaves, spec)
    sizes = _known[key]
    return sizes[place] if place < len(sizes) else 0


def _like(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return tuple(leaf.shape), leaf.stride(), leaf.dtype


def _measured(target: Any, leaves: list[Any], spec: Any) -> list[int]:
    below = torch._C._AutoDispatchBelowAutograd
    # With gradients on, as forward runs: else some kernels leave the workspace out.
    with _disable_current_modes(), torch.enable_grad(), below(), preserve_rng_state():
        try:
            args, kwargs = pytree.tree_unflatten(list(map(_zeros, leaves)), spec)
            results = target(*args, **kwargs)
        except Exception:
            return []
    several = results if isinstance(results, (tuple, list)) else (results,)
    return [
        one.untyped_storage().nbytes() if isinstance(one, torch.Tensor) else 0 for one in several
    ]


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()
