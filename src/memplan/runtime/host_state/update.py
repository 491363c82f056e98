"""The update of one parameter whose optimizer's state is on the host, a piece at a time.

The optimizer's own code runs on the device, on flat pieces of the parameter, its gradient and its
state: the optimizers that this is done for look at one element at a time, so that every bit is as
without pieces. State that is one number, such as a count of steps, stays where it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memplan.runtime.host_state.ring import Ring, pieces
from memplan.runtime.one_update import alone, plain_step

New = Callable[[Tensor], Tensor]
"""An empty host tensor, page-locked where that can be, of the shape and strides of a tensor."""


def update_by_pieces(
    ring: Ring, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, new: New
) -> None:
    """What `optimizer.step()` does to the parameter. Its state is on the host afterwards."""
    gradient = parameter.grad
    assert gradient is not None
    state = optimizer.state[parameter]
    whole = {name: value for name, value in state.items() if _lies_like(value, parameter)}
    if whole and not all(value.device.type == "cpu" for value in whole.values()):
        _to_host(state, whole, new)
    flat_parameter, flat_gradient = _flat(parameter.detach()), _flat(gradient)
    counts = {name: value for name, value in state.items() if name not in whole}
    after: dict[str, Any] = {}

    def use(start: int, stop: int, buffers: list[Tensor]) -> None:
        nonlocal after
        piece = flat_parameter[start:stop]
        piece.grad = flat_gradient[start:stop]
        last = stop == parameter.numel()
        own = {name: value if last else _copy(value) for name, value in counts.items()}
        own |= dict(zip(whole, buffers, strict=True))
        after = _step(optimizer, group, piece, own)

    if whole:
        ring.pass_through([_flat(value) for value in whole.values()], use)
        for name in counts:
            state[name] = after[name]
        for name, value in after.items():
            state.setdefault(name, value)
        return
    _first(optimizer, group, parameter, use, lambda: after, new)


def _first(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameter: Tensor,
    use: Callable[[int, int, list[Tensor]], None],
    after: Callable[[], dict[str, Any]],
    new: New,
) -> None:
    """The first update makes the state, piece by piece."""
    made: dict[str, Any] = {}
    for start, stop in pieces(parameter.numel()):
        use(start, stop, [])
        for name, value in after().items():
            if isinstance(value, Tensor) and value.shape == (stop - start,) and value.dim():
                if start == 0:
                    like = torch.empty_like(parameter, dtype=value.dtype, device="meta")
                    made[name] = new(like)
                _flat(made[name])[start:stop].copy_(value)
            else:
                made[name] = value
    optimizer.state[parameter].update(made)


def _step(
    optimizer: Optimizer, group: dict[str, Any], piece: Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    shell = alone(optimizer, group, piece)
    shell.state = defaultdict(dict, {piece: state} if state else {})
    plain_step(type(optimizer))(shell)
    result: dict[str, Any] = shell.state[piece]
    return result


def _to_host(state: dict[str, Any], whole: dict[str, Tensor], new: New) -> None:
    """State that is on the device, as after `load_state_dict`."""
    for name, value in whole.items():
        if value.device.type != "cpu":
            host = new(value)
            host.copy_(value)
            state[name] = whole[name] = host


def _lies_like(value: Any, parameter: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.stride() == parameter.stride()
    )


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
