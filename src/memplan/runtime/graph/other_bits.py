"""Finds where a trace of PyTorch's compiler computes other bits than the code that it is of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast

from memplan.runtime.graph.joint import is_random

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_UNSAFE_SPLITS = (torch.ops.aten.unsafe_split, torch.ops.aten.unsafe_split_with_sizes)


def casts_once(module: fx.GraphModule) -> bool:
    """Whether autocast keeps its casts of weights, in Dynamo's graph or around the call."""
    around = torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()
    entered = (node.args for node in _nodes(module) if node.target is _enter_autocast)
    return around or any(on and cached is not False for _, _, on, cached in entered)


def difference(
    module: fx.GraphModule,
    joint: fx.Graph,
    primals: Sequence[Any],
    *,
    casts_once: bool,
    writes: bool,
) -> str:
    """Why a joint graph gives other bits; empty where it gives the same.

    `module` is Dynamo's graph, `primals` its inputs. `casts_once`: the answer of `casts_once`
    before the joint graph was traced. `writes`: whether the code changes something that is there
    before and after.
    """
    if _recurrent_rows_differ(joint):
        return (
            "a recurrent cell on the CPU whose width is no multiple of 64: PyTorch's capture lays "
            "out its gates in another way, which changes their last bits"
        )
    if casts_once and _several_casts(joint, primals):
        return (
            "a weight that one autocast casts for several uses: PyTorch's capture casts it for "
            "each, and adds up their gradients in another precision"
        )
    again = [node for node in joint.nodes if node.meta.get("recompute")]
    if again and writes:
        return "a checkpoint around what changes a buffer: run twice, it changes it twice"
    for node in _nodes(module):
        if node.target is _CHECKPOINT:
            if node.kwargs.get("use_reentrant") is not False:
                return "a reentrant checkpoint, which adds up gradients in an order of its own"
            if not node.kwargs.get("preserve_rng_state", True) and any(map(is_random, again)):
                return "a checkpoint that draws other random numbers when it runs again"
    return ""


def _recurrent_rows_differ(joint: fx.Graph) -> bool:
    """Whether recurrent cells on the CPU compute in place on parts of a tensor whose rows are not a
    multiple of 64 elements.

    In a traced graph those parts have memory of their own, without gaps between rows. Kernels use
    other instructions for the end of a row that does not fill a vector, so that the last bits of
    results differ. No vector is longer than 64 elements.
    """
    return any(
        one.device.type == "cpu" and not one.is_contiguous() and one.shape[-1] % 64
        for node in joint.nodes
        if getattr(node.target, "overloadpacket", None) in _UNSAFE_SPLITS
        for one in node.meta["val"]
    )


def _several_casts(joint: fx.Graph, primals: Sequence[Any]) -> bool:
    """Whether an input that requires a gradient is cast to one type more than once."""
    casts = Counter(
        (node.args[0], node.kwargs.get("dtype"))
        for node in joint.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    )
    several = {one for (one, _), count in casts.items() if count > 1}
    inputs = zip(primals, joint.find_nodes(op="placeholder"), strict=False)
    return any(node in several for one, node in inputs if getattr(one, "requires_grad", False))


def _nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes
