"""Updates parameters before their optimizer's own step, which then finds no gradient of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memplan.runtime import one_update


class InsteadOfStep(ABC):
    """A context manager that updates parameters of every optimizer that steps while it is entered.
    Where updates run in the backward pass, they come here, too (`one_update.update`). Afterwards an
    optimizer's state becomes plain when the optimizer steps again, not at once: at the end of a
    program nobody needs it, and the card may have no room."""

    def __init__(self) -> None:
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._remove_handles()
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        one_update.instead.append(self._update)
        return self

    def __exit__(self, *_exc: object) -> None:
        one_update.instead.remove(self._update)
        self._remove_handles()
        self._handles = [register_optimizer_step_pre_hook(self._steps_plainly)]
        self._show_gradients()

    def _remove_handles(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _steps_plainly(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._make_plain(optimizer)

    @abstractmethod
    def _make_plain(self, optimizer: Optimizer) -> None:
        """Give an optimizer that was served the state that its own step has."""

    @abstractmethod
    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """A step begins; other arguments for it, or None."""

    @abstractmethod
    def _update(self, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
        """Update the parameter, which has a gradient; False where its optimizer is to do it."""

    def _updated(self, optimizer: Optimizer, group: dict[str, Any]) -> Iterator[Tensor]:
        """Those parameters of the group that have been updated, each as soon as it has been."""
        with_gradient = [one for one in group["params"] if one.grad is not None]
        return (one for one in with_gradient if self._update(optimizer, group, one))

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._hidden.clear()  # of a step that raised: what it updated is not updated again
        others = self._begins(optimizer, args, kwargs)
        try:
            for group in optimizer.param_groups:
                for parameter in self._updated(optimizer, group):
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None
        except BaseException:
            self._show_gradients()
            raise
        return others

    def _after(self, *_arguments: Any) -> None:
        self._show_gradients()

    def _show_gradients(self) -> None:
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            parameter.grad = gradient


def closures_of(args: Any, kwargs: Any) -> list[Any]:
    """What a step was given, as its hooks see it."""
    return [value for value in (*args[1:], *kwargs.values()) if value is not None]
