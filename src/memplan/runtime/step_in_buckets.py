"""Puts a plan's part `step` into effect: optimizers update a bucket of parameters at a time.

The foreach operators of PyTorch's optimizers make temporaries of the size of all parameters: one
tensor for each where Adam takes a square root. A bucket's are gone before the next one's are made.
The optimizer's own code runs, on fewer parameters at a time, and on large ones by pieces.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memplan.runtime.instead_of_step import InsteadOfStep, closures_of
from memplan.runtime.one_update import update
from memplan.runtime.optimizer_in_backward.one_parameter import share_memory, why_not
from memplan.runtime.shards import part_of
from memplan.runtime.update_by_pieces import in_place, is_regular, on_device, update_by_pieces

ELEMENTS = 2**24
"""Elements of a bucket: by the card's bandwidth their update takes longer than its kernels take to
launch."""


_DYNAMO = torch._C._dynamo.eval_frame


class StepInBuckets(InsteadOfStep):
    """A context manager for every optimizer that steps while it is entered."""

    def __init__(self, on_note: Callable[[str], None] = lambda text: None) -> None:
        """`on_note` is told, in a sentence, why an optimizer updates all parameters at once."""
        super().__init__()
        self._on_note = on_note
        self._whole: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that are left alone for good."""

    def _make_plain(self, optimizer: Optimizer) -> None:
        """Its state is as its own step makes it."""

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._whole or _is_small(optimizer) or _is_compiled():
            return
        reason = "its step takes a closure" if closures_of(args, kwargs) else ""
        if reason := reason or why_not(optimizer) or _irregular(optimizer):
            self._whole.add(optimizer)
            self._on_note(f"an optimizer updates all its parameters at once: {reason}")

    def _updated(self, optimizer: Optimizer, group: dict[str, Any]) -> Iterator[Tensor]:
        left = optimizer in self._whole or _is_small(optimizer) or _is_compiled()
        if left or group.get("fused"):
            return
        for bucket in _buckets([one for one in group["params"] if one.grad is not None]):
            if _goes_by_pieces(bucket[0]):
                pass_through, new = in_place(ELEMENTS), on_device(bucket[0])
                update_by_pieces(optimizer, group, bucket[0], pass_through, ELEMENTS, new)
            else:
                with torch.no_grad():
                    update(optimizer, group, *bucket)
            yield from bucket

    def _update(self, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
        return False  # what is updated by itself needs no bucket


def _is_small(optimizer: Optimizer) -> bool:
    """Whether one bucket holds all its parameters."""
    elements: int = sum(one.numel() for group in optimizer.param_groups for one in group["params"])
    return elements <= ELEMENTS


def _is_compiled() -> bool:
    """Whether the step is within a compiled function, perhaps where Dynamo has left it: kernels of
    the rest, such as the optimizer's code, are not the eager ones there."""
    return torch.compiler.is_compiling() or _DYNAMO.get_eval_frame_callback() is not None


def _irregular(optimizer: Optimizer) -> str:
    """Foreach operators take another way, perhaps with other bits, for the whole list in which one
    tensor is laid out differently."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if not all(one.grad is None or is_regular(optimizer, one) for one in parameters):
        return "a gradient or state is laid out in another way than its parameter"
    return "parameters share memory" if share_memory(parameters) else ""


def _goes_by_pieces(parameter: Tensor) -> bool:
    """On the CPU the last elements of a range of 16-bit numbers are rounded in another way, so
    that bits would depend on where it is cut."""
    rounds = parameter.is_cpu and parameter.itemsize == 2
    return part_of(parameter).numel() > ELEMENTS and not rounds


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """One after the other, as many as have at most ELEMENTS; larger ones alone."""
    bucket: list[Tensor] = []
    elements = 0
    for parameter in parameters:
        size = part_of(parameter).numel()
        if bucket and elements + size > ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(parameter)
        elements += size
    if bucket:
        yield bucket
