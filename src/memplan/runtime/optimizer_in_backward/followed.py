"""The parameters of one optimizer, each with a hook that fires when its gradient is complete."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from memplan.runtime.optimizer_in_backward.applied_gradient import AppliedGradient
from memplan.runtime.optimizer_in_backward.one_parameter import settings, why_not_step
from memplan.runtime.optimizer_in_backward.watched import storage_of
from memplan.runtime.shards import part_of
from memplan.runtime.update_by_pieces import is_regular, update_one


class Parameter:
    """One parameter in one backward pass. Keeps neither it nor its optimizer alive."""

    def __init__(self, tensor: Tensor, optimizer: Optimizer, group: int) -> None:
        self._tensor = weakref.ref(tensor)
        self.optimizer = weakref.ref(optimizer)
        self._group = group
        self.ready = 0
        """How often its gradient was complete."""
        self.updated = False
        self.applied: AppliedGradient | None = None
        self._seen: tuple[int, int] = (0, 0)
        """Storage and version of the gradient when it was complete."""
        self._left: tuple[tuple[int, int], list[Any]] = (0, 0), []
        """Storage and version of the parameter when its gradient was complete or, where that came
        early, after its update; and its optimizer's state."""

    @property
    def tensor(self) -> Tensor:
        tensor = self._tensor()
        assert tensor is not None, "the optimizer that holds it is alive"
        return tensor

    @property
    def state(self) -> list[Tensor]:
        """What the optimizer keeps for it."""
        return [value for value in self._state_values() if isinstance(value, Tensor)]

    def _state_values(self) -> list[Any]:
        optimizer, tensor = self.optimizer(), self.tensor
        known = optimizer is not None and tensor in optimizer.state
        return list(optimizer.state[tensor].values()) if optimizer is not None and known else []

    def begin(self) -> None:
        self.ready, self.updated = 0, False

    def gradient_is_complete(self, gradient: Tensor) -> None:
        self.ready += 1
        self._seen = _state(gradient)
        self._left = _state(self.tensor), self._state_values()

    def irregular(self) -> str:
        """Why its gradient at the optimizer's step is not what backward left; else empty."""
        gradient = self.tensor.grad
        if gradient is None:
            return "gradients are removed before the optimizer's step" if self.ready else ""
        if self.ready == 0:
            return "a gradient comes from elsewhere than the backward pass"
        if self.ready > 1:
            return "a gradient comes in several parts"
        if self._seen != _state(gradient):
            return "gradients are changed before the optimizer's step"
        if not self.is_as_left():
            return "weights or the optimizer's state are replaced before its step"
        return ""

    def update(self, clip: float | None = None) -> None:
        """The optimizer's update, now; the gradient is released. `clip`: the job clips it to ±
        this afterwards, and it has not done so yet."""
        optimizer, tensor = self.optimizer(), self.tensor
        assert optimizer is not None, "it is about to step"
        if clip is not None and tensor.grad is not None:
            part_of(tensor.grad.detach()).clamp_(-clip, clip)
        update_one(optimizer, optimizer.param_groups[self._group], tensor)
        if self.applied is None or not _alike(self.applied, tensor):
            self.applied = AppliedGradient(tensor)
        self.applied.clips, self.applied.lower, self.applied.upper = clip is not None, None, None
        tensor.grad = self.applied
        self.updated = True
        self._left = _state(tensor), self._state_values()

    def is_as_left(self) -> bool:
        """Whether it and its optimizer's state are still those of that moment."""
        now, (parameter, state) = self._state_values(), self._left
        return _state(self.tensor) == parameter and (
            len(now) == len(state) and all(map(operator.is_, now, state))
        )

    def is_new(self) -> bool:
        """Whether its update would be the first, where the optimizer keeps something: that is made
        in the step, for a default device and the like do not hold in the backward pass."""
        optimizer = self.optimizer()
        assert optimizer is not None
        return bool(optimizer.state) and self.tensor not in optimizer.state

    def may_be_updated(self) -> bool:
        """Whether its gradient is such that an update alone does what one with the others does."""
        optimizer, tensor = self.optimizer(), self.tensor
        assert optimizer is not None
        return tensor.grad is not None and is_regular(optimizer, tensor)


class Followed:
    """An optimizer whose parameters have hooks."""

    def __init__(
        self,
        optimizer: Optimizer,
        on_ready: Callable[[Parameter], None],
        on_state: Callable[[str], None],
    ) -> None:
        """`on_ready` is called when a gradient is complete, `on_state` before the optimizer's state
        is saved or loaded as a whole, with the name of the function."""
        self._optimizer = weakref.ref(optimizer)
        self._key, self._places = _key(optimizer), _places(optimizer)
        self.parameters = [
            Parameter(tensor, optimizer, number)
            for number, group in enumerate(optimizer.param_groups)
            for tensor in group["params"]
            if tensor.requires_grad
        ]
        handles = [
            one.tensor.register_post_accumulate_grad_hook(_Ready(one, on_ready))
            for one in self.parameters
        ]
        handles += [
            optimizer.register_state_dict_pre_hook(lambda _: on_state("state_dict")),
            optimizer.register_load_state_dict_pre_hook(lambda *_: on_state("load_state_dict")),
        ]
        self.close = weakref.finalize(optimizer, _remove, handles)
        """Takes the hooks away; as does the end of the optimizer."""
        self.settings: list[dict[str, Any]] = []
        """Hyperparameters by group, at the beginning of the backward pass."""

    @property
    def changed(self) -> bool:
        """Whether the optimizer has other parameters than those that are followed."""
        optimizer = self._optimizer()
        return optimizer is None or _key(optimizer) != self._key

    def moved(self) -> bool:
        """Whether parameters have been put elsewhere since the last call."""
        optimizer = self._optimizer()
        before, self._places = self._places, _places(optimizer) if optimizer is not None else []
        return self._places != before

    def begin(self) -> None:
        """A backward pass begins."""
        for one in self.parameters:
            one.begin()
        self.settings = self._settings_now()

    def why_not(self) -> str:
        """Why nothing may be updated in the backward pass that begins; empty where all may."""
        optimizer = self._optimizer()
        assert optimizer is not None, "a training loop is about to use it"
        if reason := why_not_step(optimizer):
            return reason
        for one in self.parameters:
            tensor = one.tensor
            if tensor.grad is not None:
                return "gradients are kept from one backward pass to the next"
            hooks: Any = tensor._post_accumulate_grad_hooks
            if len(hooks) != 1:
                return "something else waits for the gradients"
        return ""

    def irregular(self) -> str:
        """Why what comes to the step is not what the backward pass has left; empty where it is."""
        if reason := next(filter(None, (one.irregular() for one in self.parameters)), ""):
            return reason
        if self.changed:
            return "the optimizer's groups change before its step"
        if not all(one.may_be_updated() for one in self.with_gradient()):
            return "a gradient is sparse or laid out in another way than its parameter"
        if self.settings_changed():
            return "hyperparameters change between the backward pass and the optimizer's step"
        return ""

    def settings_changed(self) -> bool:
        return self._settings_now() != self.settings

    def _settings_now(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        return [settings(group) for group in optimizer.param_groups] if optimizer else []

    def with_gradient(self) -> Iterator[Parameter]:
        return (one for one in self.parameters if one.tensor.grad is not None)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class _Ready:
    """A hook that copies and pickles of its tensor do not share."""

    def __init__(
        self,
        parameter: Parameter | None = None,
        on_ready: Callable[[Parameter], None] | None = None,
    ) -> None:
        self._parameter, self._on_ready = parameter, on_ready

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __call__(self, _tensor: Tensor) -> None:
        if self._parameter is not None and self._on_ready is not None:
            self._on_ready(self._parameter)


def _state(tensor: Tensor) -> tuple[int, int]:
    """Storage and version."""
    return storage_of(tensor), tensor._version


def _alike(applied: AppliedGradient, tensor: Tensor) -> bool:
    return (
        applied.device == tensor.device
        and applied.dtype == tensor.dtype
        and applied.shape == tensor.shape
        and applied.stride() == tensor.stride()
    )


def _key(optimizer: Optimizer) -> list[list[int]]:
    """Changes with the optimizer's groups and the parameters in them."""
    return [[id(tensor) for tensor in group["params"]] for group in optimizer.param_groups]


def _places(optimizer: Optimizer) -> list[int]:
    """Storages of its parameters."""
    return [storage_of(tensor) for group in optimizer.param_groups for tensor in group["params"]]
