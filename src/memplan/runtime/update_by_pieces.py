"""An optimizer's update of one parameter, a piece at a time, to the bit as its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memplan.runtime.one_update import alone, instead, plain_step, update
from memplan.runtime.shards import of_parts, part_of, same_parts

Use = Callable[[int, int, list[Tensor]], None]
"""Is given `[start, stop)` of flat tensors, and those pieces of them where they can be updated."""
PassThrough = Callable[[Sequence[Tensor], Use], None]
"""Gives flat tensors to a `Use`, piece after piece."""


def pieces(elements: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `most` that cover `[0, elements)`."""
    for start in range(0, elements, most):
        yield start, min(start + most, elements)


@torch.no_grad()
def update_one(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    """What `optimizer.step()` does to the parameter. Of a distributed tensor the rank's part, where
    it has one, is updated as a plain tensor: DTensor takes much longer to start an operator."""
    part = part_of(parameter)
    if part is parameter or not part.numel():
        update(optimizer, group, parameter)
    elif not any(other(optimizer, group, parameter) for other in instead):
        update_by_pieces(
            optimizer, group, parameter, in_place(part.numel()), part.numel(), on_device(parameter)
        )


def in_place(most: int) -> PassThrough:
    """For state on the device: pieces of it are updated where they are."""

    def pass_through(tensors: Sequence[Tensor], use: Use) -> None:
        for start, stop in pieces(tensors[0].numel(), most):
            use(start, stop, [one[start:stop] for one in tensors])

    return pass_through


def on_device(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    """Makes state where the parameter is."""
    return lambda like: torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device=parameter.device
    )


@torch.no_grad()
def update_by_pieces(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameter: Tensor,
    pass_through: PassThrough,
    most: int,
    new: Callable[[Tensor], Tensor],
) -> None:
    """What `optimizer.step()` does to the parameter, in pieces of at most `most` elements. `new`
    makes the state of the first update: an empty tensor of the shape, strides and dtype of another.

    The optimizer's own code runs on the device, on flat pieces of the parameter, its gradient and
    its state: the optimizers that this is done for look at one element at a time, so that every bit
    is as without pieces. State that is one number, such as a count of steps, stays where it is.
    """
    gradient, part = parameter.grad, part_of(parameter).detach()
    assert gradient is not None
    state = optimizer.state.get(parameter, {})
    whole = of_each_element(state, parameter)
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
        pass_through([_flat(value) for value in whole.values()], use)
        for name in counts:
            state[name] = after[name]
        for name, value in after.items():
            state.setdefault(name, value)
    else:
        made, others = _first(part, use, lambda: after, most, new)
        others |= {name: of_parts(value, parameter) for name, value in made.items()}
        if others:
            optimizer.state[parameter].update(others)
    if part is not parameter:
        torch.autograd.graph.increment_version(parameter)


def _first(
    parameter: Tensor,
    use: Use,
    after: Callable[[], dict[str, Any]],
    most: int,
    new: Callable[[Tensor], Tensor],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The first update makes the state, piece by piece: what lies like the parameter, and the
    rest."""
    made: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for start, stop in pieces(parameter.numel(), most):
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


def of_each_element(state: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The state that has an element for each of the parameter; the rank's part of it."""
    return {name: part_of(one) for name, one in state.items() if lies_like(one, parameter)}


def is_regular(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether its gradient, and its state but for single numbers, lie in memory as it does."""
    gradient = parameter.grad
    assert gradient is not None
    state = optimizer.state.get(parameter, {}).values()
    tensors = [one for one in state if isinstance(one, Tensor) and one.dim()]
    return (
        type(part_of(gradient)) is Tensor
        and gradient.dtype == parameter.dtype
        and all(lies_like(one, parameter) for one in (gradient, *tensors))
    )


def lies_like(value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or not same_parts(value, parameter):
        return False
    part, whole = part_of(value), part_of(parameter)
    return part.shape == whole.shape and part.stride() == whole.stride()


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
