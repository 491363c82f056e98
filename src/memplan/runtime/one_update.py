"""What `optimizer.step()` does to some parameters alone: by the optimizer's own code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Adafactor, Optimizer, SparseAdam

from memplan.capturing.patches.job_observer import others_see_steps

_NOT_EACH_BY_ITSELF = (LBFGS, SparseAdam)

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


def of_torch(kind: type[Optimizer]) -> type[Optimizer]:
    """The class of PyTorch's that an optimizer is, or the first of its own."""
    found = [one for one in kind.__mro__ if issubclass(one, Optimizer) and one is not Optimizer]
    of_torch = (one for one in found if f"{one.__module__}.".startswith("torch.optim."))
    return next(of_torch, Optimizer if not found else found[0])


def each_by_itself(optimizer: Optimizer) -> bool:
    """Whether a step of one parameter gives the bits that a step of all gives."""
    kind, own = type(optimizer), vars(optimizer)
    return (
        of_torch(kind) is kind
        and _is_as_it_was(kind.step)
        and all(_is_as_it_was(own[name]) for name in own if callable(getattr(kind, name, None)))
        and not isinstance(optimizer, _NOT_EACH_BY_ITSELF)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not others_see_steps()
        and not any(group.get("differentiable") for group in optimizer.param_groups)
        # An option that computes what it is may depend on what the loss changes.
        and all(map(_is_plain, optimizer.param_groups))
        # Its foreach norms are reduced in an order that depends on the list of parameters.
        and not (
            kind is Adafactor and any(group.get("foreach") for group in optimizer.param_groups)
        )
    )


def _is_plain(group: dict[str, Any]) -> bool:
    """Whether a group and its options are of no class of the user's."""
    kinds = map(type, (group, *group.values()))
    return all(k.__module__.partition(".")[0] in ("builtins", "torch", "numpy") for k in kinds)


def _is_as_it_was(step: Any) -> bool:
    """Whether nobody put a function of his own in place of PyTorch's, or around it. Schedulers of
    learning rates do, to count the steps."""
    while step is not None:
        known = getattr(step, "__globals__", {})  # a partial and a callable object have none
        if not f"{known.get('__name__')}.".startswith(("torch.", "memplan.")):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


class _BegunError(Exception):
    pass


def begin(shell: Any) -> None:
    """Have an optimizer make the state that its step begins with, and no step."""
    make = getattr(shell, "_init_group", None)
    if make is None:
        return

    def begun(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        raise _BegunError

    shell._init_group = begun
    with suppress(_BegunError):
        plain_step(of_torch(type(shell)))(shell)
