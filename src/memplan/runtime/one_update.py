"""What `optimizer.step()` does to some parameters alone: by the optimizer's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

instead: list[Callable[[Optimizer, dict[str, Any], Tensor], bool]] = []
"""Asked first by `update`: whether they have updated the parameter."""


def update(optimizer: Optimizer, group: dict[str, Any], *parameters: Tensor) -> None:
    """No hook of the optimizer is called. Raises what its step raises."""
    left = [one for one in parameters if not any(other(optimizer, group, one) for other in instead)]
    if left:
        plain_step(type(optimizer))(alone(optimizer, group, *left))


def alone(optimizer: Optimizer, group: dict[str, Any], *parameters: Tensor) -> Any:
    """The optimizer with no other parameters than these; it has the same state."""
    shell: Any = object.__new__(type(optimizer))
    shell.__dict__ = {**vars(optimizer), "param_groups": [{**group, "params": list(parameters)}]}
    return shell


def plain_step(kind: type[Optimizer]) -> Callable[[Any], Any]:
    """The step of a class without what PyTorch wraps around it to call hooks."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]
