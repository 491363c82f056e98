"""Puts a plan's part `state` into effect: optimizers' state in the host's memory.

Before an optimizer's own step, each parameter whose state is on the host is updated, its state
streamed through the device. Rajbhandari et al. (2021),
"ZeRO-Infinity", stream state in the same way but compute on the host; here the arithmetic stays on
the device, so that no bit changes.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from memplan.runtime.host_buffers import PageLock
from memplan.runtime.host_state.ring import Ring, pieces
from memplan.runtime.host_state.shards import of_parts, part_of, same_parts
from memplan.runtime.instead_of_step import InsteadOfStep, closures_of
from memplan.runtime.one_update import alone, plain_step
from memplan.runtime.optimizer_in_backward.one_parameter import why_not
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
        if reason := closure or why_not(optimizer, part_of):
            self._give_up(optimizer, reason)

    def _after(self, *_arguments: Any) -> None:
        super()._after()
        self._synchronize()

    def _synchronize(self) -> None:
        for ring in self._rings.values():
            ring.synchronize()

    def _update(self, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
        """Whether the parameter is one of those whose state is on the host; then it is updated."""
        gradient = parameter.grad
        assert gradient is not None
        if type(part_of(gradient)) is not Tensor or parameter not in self._parameters(optimizer):
            return False
        if not same_parts(parameter, gradient) or gradient.dtype != parameter.dtype:
            return False
        if part_of(gradient).stride() != part_of(parameter).stride():
            return False
        ring = self._rings.get(parameter.device)
        if ring is None:
            ring = self._rings[parameter.device] = Ring(parameter.device)
        with torch.no_grad():
            update_by_pieces(ring, optimizer, group, parameter, self._new)
        return True

    def _parameters(self, optimizer: Optimizer) -> Any:
        """The parameters whose state is on the host, chosen when the optimizer first steps."""
        found = self._chosen.get(optimizer)
        if found is not None:
            return found
        if reason := why_not(optimizer, part_of):
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
                if _lies_like(value, parameter):
                    state[name] = of_parts(part_of(value).to(parameter.device), parameter)

    def _new(self, like: Tensor) -> Tensor:
        host = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        if "cuda" in self._devices:
            self._lock.lock(host)
        return host


New = Callable[[Tensor], Tensor]
"""An empty host tensor, page-locked where that can be, of the shape and strides of a tensor."""


def update_by_pieces(
    ring: Ring, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, new: New
) -> None:
    """What `optimizer.step()` does to the parameter, a piece at a time. Its state is on the host
    afterwards.

    The optimizer's own code runs on the device, on flat pieces of the parameter, its gradient and
    its state: the optimizers that this is done for look at one element at a time, so that every bit
    is as without pieces. State that is one number, such as a count of steps, stays where it is.
    """
    gradient, part = parameter.grad, part_of(parameter).detach()
    assert gradient is not None
    state = optimizer.state[parameter]
    whole = {name: part_of(one) for name, one in state.items() if _lies_like(one, parameter)}
    for name, value in whole.items():
        if value.device.type != "cpu":  # as after `load_state_dict`
            whole[name] = new(value).copy_(value)
            state[name] = of_parts(whole[name], parameter)
    flat_parameter, flat_gradient = _flat(part), _flat(part_of(gradient))
    counts = {name: value for name, value in state.items() if name not in whole}
    after: dict[str, Any] = {}

    def use(start: int, stop: int, buffers: list[Tensor]) -> None:
        nonlocal after
        piece = flat_parameter[start:stop]
        piece.grad = flat_gradient[start:stop]
        last = stop == part.numel()
        own = {name: value if last else _copy(value) for name, value in counts.items()}
        own |= dict(zip(whole, buffers, strict=True))
        after = _step(optimizer, group, piece, own)

    if whole:
        ring.pass_through([_flat(value) for value in whole.values()], use)
        for name in counts:
            state[name] = after[name]
        for name, value in after.items():
            state.setdefault(name, value)
    else:
        made, others = _first(part, use, lambda: after, new)
        state.update(others)
        state.update((name, of_parts(value, parameter)) for name, value in made.items())
    if part is not parameter:
        torch.autograd.graph.increment_version(parameter)


def _first(
    parameter: Tensor,
    use: Callable[[int, int, list[Tensor]], None],
    after: Callable[[], dict[str, Any]],
    new: New,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The first update makes the state, piece by piece: on the host what lies like the parameter,
    and the rest."""
    made: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for start, stop in pieces(parameter.numel()):
        use(start, stop, [])
        for name, value in after().items():
            if isinstance(value, Tensor) and value.shape == (stop - start,) and value.dim():
                if start == 0:
                    like = torch.empty_like(parameter, dtype=value.dtype, device="meta")
                    made[name] = new(like)
                _flat(made[name])[start:stop].copy_(value)
            else:
                others[name] = value
    return made, others


def _step(
    optimizer: Optimizer, group: dict[str, Any], piece: Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    shell = alone(optimizer, group, piece)
    shell.state = defaultdict(dict, {piece: state} if state else {})
    plain_step(type(optimizer))(shell)
    result: dict[str, Any] = shell.state[piece]
    return result


def _lies_like(value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or not same_parts(value, parameter):
        return False
    part, whole = part_of(value), part_of(parameter)
    return part.shape == whole.shape and part.stride() == whole.stride()


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
