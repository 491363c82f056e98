"""Puts a plan's part `state` into effect: optimizers' state in the host's memory.

Before an optimizer's own step, each parameter whose state is on the host is updated, its state
streamed through the device. Rajbhandari et al. (2021),
"ZeRO-Infinity", stream state in the same way but compute on the host; here the arithmetic stays on
the device, so that no bit changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from memplan.runtime.host_buffers import PageLock
from memplan.runtime.host_state.ring import Ring
from memplan.runtime.instead_of_step import InsteadOfStep, closures_of
from memplan.runtime.optimizer_in_backward.one_parameter import why_not
from memplan.runtime.shards import of_parts, part_of
from memplan.runtime.update_by_pieces import (
    is_regular,
    lies_like,
    of_each_element,
    update_by_pieces,
)
from memplan.types.plan import StatePart

_SMALLEST = 2**16
"""Elements of a parameter whose state is worth a copy."""


class HostState(InsteadOfStep):
    """A context manager for every optimizer that steps while it is entered."""

    def __init__(
        self,
        part: StatePart,
        on_note: Callable[[str], None] = lambda text: None,
        *,
        devices: tuple[str, ...] = ("cuda",),
    ) -> None:
        """`on_note` is told, in a sentence, why an optimizer's state stays on the device.
        `devices`: kinds of device that parameters are on."""
        super().__init__()
        self._part = part
        self._on_note = on_note
        self._devices = devices
        self._rings: dict[torch.device, Ring] = {}
        self._chosen: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._lock = PageLock(on_note)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._synchronize()
        self._rings.clear()

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._chosen and not self._chosen[optimizer]:
            return
        closure = "its step takes a closure" if closures_of(args, kwargs) else ""
        if reason := closure or why_not(optimizer):
            self._give_up(optimizer, reason)

    def _after(self, *_arguments: Any) -> None:
        super()._after()
        self._synchronize()

    def _synchronize(self) -> None:
        for ring in self._rings.values():
            ring.synchronize()

    def _update(self, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
        """Whether the parameter is one of those whose state is on the host; then it is updated."""
        if parameter not in self._parameters(optimizer) or not is_regular(optimizer, parameter):
            return False
        ring = self._rings.get(parameter.device)
        if ring is None:
            ring = self._rings[parameter.device] = Ring(parameter.device)
        state = optimizer.state.get(parameter, {})
        for name, whole in of_each_element(state, parameter).items():
            if whole.device.type != "cpu":  # as after `load_state_dict`
                state[name] = of_parts(self._new(whole).copy_(whole), parameter)
        update_by_pieces(optimizer, group, parameter, ring.pass_through, ring.elements, self._new)
        return True

    def _parameters(self, optimizer: Optimizer) -> Any:
        """The parameters whose state is on the host, chosen when the optimizer first steps."""
        found = self._chosen.get(optimizer)
        if found is not None:
            return found
        if reason := why_not(optimizer):
            return self._give_up(optimizer, reason)
        found = self._chosen[optimizer] = WeakTensorKeyDictionary()
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        sizes = [part_of(one).numel() for one in parameters]
        left = self._part.share * sum(sizes)
        for parameter, size in zip(parameters, sizes, strict=True):
            if size >= _SMALLEST and left > 0 and parameter.device.type in self._devices:
                found[parameter] = True
                left -= size
        return found

    def _give_up(self, optimizer: Optimizer, reason: str) -> Any:
        """Move the optimizer's state to the card for good, because of something that the optimizer
        got since, such as a hook, which would notice the difference."""
        self._on_note(f"an optimizer's state stays on the card: {reason}")
        self._make_plain(optimizer)
        found = self._chosen[optimizer] = WeakTensorKeyDictionary()
        return found

    def _make_plain(self, optimizer: Optimizer) -> None:
        for parameter in self._chosen.pop(optimizer, ()):
            state = optimizer.state[parameter]
            for name, value in state.items():
                if lies_like(value, parameter):
                    state[name] = of_parts(part_of(value).to(parameter.device), parameter)

    def _new(self, like: Tensor) -> Tensor:
        host = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        if "cuda" in self._devices:
            self._lock.lock(host)
        return host
