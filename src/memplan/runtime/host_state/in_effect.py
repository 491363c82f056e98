"""Puts a plan's part `state` into effect: optimizers' state in the host's memory.

Before an optimizer's own step, each parameter whose state is on the host is updated, its state
streamed through the device; the step then finds no gradient of it. Where updates come in the
backward pass, they come this way too (`one_update.update`). Rajbhandari et al. (2021),
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
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from memplan.runtime import one_update
from memplan.runtime.host_buffers import PageLock
from memplan.runtime.host_state.ring import Ring
from memplan.runtime.host_state.update import update_by_pieces
from memplan.runtime.optimizer_in_backward.one_parameter import why_not
from memplan.types.plan import StatePart

_SMALLEST = 2**16
"""Elements of a parameter whose state is worth a copy."""


class HostState:
    """In effect on every optimizer that steps while it is entered; a context manager."""

    def __init__(
        self,
        part: StatePart,
        on_note: Callable[[str], None] = lambda text: None,
        *,
        devices: tuple[str, ...] = ("cuda",),
    ) -> None:
        """`on_note` is told, in a sentence, why an optimizer's state stays on the device.
        `devices`: kinds of device that parameters are on."""
        self._part = part
        self._on_note = on_note
        self._devices = devices
        self._rings: dict[torch.device, Ring] = {}
        self._chosen: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._handles: list[Any] = []
        self._lock = PageLock(on_note)

    def __enter__(self) -> HostState:
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        one_update.instead.append(self._update)
        return self

    def __exit__(self, *_exc: object) -> None:
        one_update.instead.remove(self._update)
        for handle in self._handles:
            handle.remove()
        self._show_gradients()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._show_gradients()  # of a step that raised
        if self._closure(args, kwargs):
            self._give_up(optimizer, "its step takes a closure")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or type(gradient) is not Tensor:
                    continue
                if self._update(optimizer, group, parameter):
                    self._hidden.append((parameter, gradient))
                    parameter.grad = None

    def _after(self, *_arguments: Any) -> None:
        self._show_gradients()
        for ring in self._rings.values():
            ring.synchronize()

    def _show_gradients(self) -> None:
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            parameter.grad = gradient

    def _update(self, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
        """Whether the parameter is one of those whose state is on the host; then it is updated."""
        gradient = parameter.grad
        assert gradient is not None
        if parameter not in self._parameters(optimizer):
            return False
        if gradient.stride() != parameter.stride() or gradient.dtype != parameter.dtype:
            return False
        ring = self._rings.get(parameter.device)
        if ring is None:
            ring = self._rings[parameter.device] = Ring(parameter.device)
        with torch.no_grad():
            update_by_pieces(ring, optimizer, group, parameter, self._new)
        return True

    def _parameters(self, optimizer: Optimizer) -> Any:
        """Those whose state is on the host, chosen when the optimizer steps first."""
        found = self._chosen.get(optimizer)
        if found is not None:
            return found
        found = self._chosen[optimizer] = WeakTensorKeyDictionary()
        if reason := why_not(optimizer):
            self._on_note(f"an optimizer's state stays on the card: {reason}")
            return found
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        left = self._part.share * sum(one.numel() for one in parameters)
        for parameter in parameters:
            large = parameter.numel() >= _SMALLEST
            if large and left > 0 and parameter.device.type in self._devices:
                found[parameter] = True
                left -= parameter.numel()
        return found

    def _give_up(self, optimizer: Optimizer, reason: str) -> None:
        if self._chosen.get(optimizer) is None:
            self._chosen[optimizer] = WeakTensorKeyDictionary()
            self._on_note(f"an optimizer's state stays on the card: {reason}")

    def _closure(self, args: Any, kwargs: Any) -> bool:
        return any(value is not None for value in (*args[1:], *kwargs.values()))

    def _new(self, like: Tensor) -> Tensor:
        host = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        if "cuda" in self._devices:
            self._lock.lock(host)
        return host
