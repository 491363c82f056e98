"""An optimizer's update of one parameter alone, to the bit as its step over all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from memplan.capturing.patches.job_observer import others_precede_steps
from memplan.runtime.optimizer_in_backward.watched import storage_of
from memplan.runtime.shards import part_of

PER_PARAMETER: frozenset[type[Optimizer]] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.Adamax,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
    }
)
"""Optimizers that look at one element of one parameter at a time, whether they go through the
parameters by a loop, by foreach operators or by fused ones: a list of one tensor gives the same
bits as a longer list. Not L-BFGS (one vector of all), not Adafactor (its foreach norms are reduced
in an order that depends on the list), not those of other packages (which may count steps by
group)."""


def why_not(optimizer: Optimizer) -> str:
    """Why its parameters cannot be updated one by one, or the rank's parts of them; empty where
    they can."""
    kind = type(optimizer)
    name = kind.__name__
    if kind not in PER_PARAMETER:
        return f"{name} is not known to update each parameter by itself"
    if reason := why_not_step(optimizer):
        return reason
    seen: set[int] = set()
    reasons = (_why_not_group(group, seen) for group in optimizer.param_groups)
    return next(filter(None, reasons), "")


def why_not_replaced(optimizer: Optimizer) -> str:
    """Why its step may do more than PyTorch's, or not come at all; empty where it may not. That of
    Accelerate with a GradScaler notes that it was called."""
    own_step = vars(optimizer).get("step")
    if own_step is None or hasattr(own_step, "_wrapped_by_lr_sched"):
        return ""
    return f"the step of this {type(optimizer).__name__} has been replaced"


def why_not_step(optimizer: Optimizer) -> str:
    """Why its next step could see a difference; empty where it cannot."""
    if (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or others_precede_steps()
    ):
        return "something is hooked on the optimizer's step"
    for group in optimizer.param_groups:
        if any(isinstance(value, Tensor) for value in group.values()):
            return "a hyperparameter of the optimizer is a tensor"
    return ""


def share_memory(tensors: Iterable[Tensor]) -> bool:
    """Whether an update of one changes another. Each fills one range of memory."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for tensor in tensors:
        part = part_of(tensor)
        first = int(part.storage_offset())
        ranges.setdefault(storage_of(part), []).append((first, first + part.numel()))
    return any(
        before[1] > after[0]
        for in_one in ranges.values()
        for before, after in itertools.pairwise(sorted(in_one))
    )


def _why_not_group(group: dict[str, Any], seen: set[int]) -> str:
    if group.get("differentiable"):
        return "the optimizer is differentiable"
    devices = set()
    for parameter in group["params"]:
        if type(part_of(parameter)) not in (Tensor, torch.nn.Parameter):
            return f"a parameter is a {type(parameter).__name__}"
        if id(parameter) in seen:
            return "a parameter is in two groups"
        seen.add(id(parameter))
        if not _dense(part_of(parameter)):
            return "a parameter has gaps in its memory"
        devices.add(parameter.device.type)
    return "" if len(devices) < 2 else "a group has parameters on devices of two kinds"


def _dense(parameter: Tensor) -> bool:
    """Whether its elements fill one range of memory. Where those of one tensor do not, foreach
    operators take another way with the whole list."""
    if parameter.layout is not torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, as they are now."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
