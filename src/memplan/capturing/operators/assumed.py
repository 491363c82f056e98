"""Assumptions about results of unknown content, made as soon as an operator returns them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.known_values.store import MAX_INTEGER_ELEMENTS, small_enough
from memplan.capturing.state import CaptureState, Observer

aten = torch.ops.aten
_MAX_ROUTING_OPTIONS = 4096


def assume_topk(state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """An unknown `topk` over few options is assumed to be a router's choice."""
    indices = result[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    scores = args[0]
    options = scores.shape[dim] if scores.dim() else 1
    if state.values.of(indices) is not None or not small_enough(indices) or indices.dim() == 0:
        return
    if options > _MAX_ROUTING_OPTIONS:
        return
    state.values.learn(indices, _assumed_topk(indices.shape, options, dim, state.routing))
    _say_assumed(state, str(func), options)


def assume_routing_map(state: CaptureState, op: str, chosen: FakeTensor, top_k: int) -> None:
    """Assume a boolean map, rows x options, in which a router chooses `top_k` in each row."""
    rows, options = chosen.shape[:-1], chosen.shape[-1]
    indices = _assumed_topk(torch.Size((*rows, top_k)), options, -1, state.routing)
    values = torch.zeros(chosen.shape, dtype=torch.bool).scatter_(-1, indices, True)
    state.values.learn(chosen, values)
    _say_assumed(state, op, options)


def _say_assumed(state: CaptureState, op: str, options: int) -> None:
    state.assume(
        "routing",
        f"choices among {options} options are "
        + ("spread evenly" if state.routing == "balanced" else "all the same"),
        op=op,
    )


def note_choice(place: int) -> Observer:
    """The result at `place` contains positions along `dim`, or in the whole tensor."""

    def observe(state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        chosen = result[place] if isinstance(result, tuple) else result
        whole = dim is None or not args[0].dim()
        state.values.note_below(chosen, args[0].numel() if whole else args[0].shape[dim])

    return observe


def note_count(state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """A sum of a mask, or of integers that are its elements, counts at most all of them."""
    counted, below = args[0], 2 if args[0].dtype == torch.bool else state.values.below(args[0])
    if below == 2 and not result.is_floating_point() and result.numel():
        state.values.note_below(result, counted.numel() // result.numel() + 1)


def keep_bound(state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Unknown integers lie below what bounds those that they are taken from."""
    made = result[0] if isinstance(result, tuple) else result
    below = 2 if args[0].dtype == torch.bool else state.values.below(args[0])
    if below is not None and not made.is_floating_point():
        state.values.note_below(made, below)


def _largest_of_each(state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    keep_bound(state, func, args, kwargs, result)
    note_choice(1)(state, func, args, kwargs, result)


def assume_uniform(value: int) -> Observer:
    """The result is assumed to be one value everywhere: no number is NaN or infinite."""

    def observe(state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if state.values.of(result) is None and result.numel() <= MAX_INTEGER_ELEMENTS:
            state.values.learn(result, torch.full(result.shape, value, dtype=result.dtype))

    return observe


def compared(value: int) -> Observer:
    """Comparisons with itself (equal) and with infinity (not equal), of which `isfinite` is made.
    Minus infinity is what masks contain."""
    assume = assume_uniform(value)

    def observe(state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if args[1] is args[0] or (isinstance(args[1], float) and args[1] == math.inf):
            assume(state, func, args, kwargs, result)

    return observe


def any_of_numbers(state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Unknown numbers are assumed not to be all zero."""
    if args[0].is_floating_point():
        state.values.note_origin(result, "all")


def _assumed_topk(shape: torch.Size, options: int, dim: int, routing: str) -> torch.Tensor:
    """Indices of shape `shape` into `options` choices along `dim`; distinct along `dim`."""
    dim %= len(shape)
    chosen = shape[dim]
    rank = torch.arange(chosen).view([-1 if axis == dim else 1 for axis in range(len(shape))])
    if routing == "worst":
        return rank.expand(shape).contiguous()
    rows = [1 if axis == dim else size for axis, size in enumerate(shape)]
    count = 1
    for size in rows:
        count *= size
    row = torch.arange(count).view(rows)
    return ((row * chosen + rank) % max(options, 1)).expand(shape).contiguous()


OBSERVERS: dict[Any, Observer] = {
    aten.topk.default: assume_topk,
    aten.any.default: any_of_numbers,
    aten.argmax.default: note_choice(0),
    aten.argmin.default: note_choice(0),
    aten.max.dim: _largest_of_each,
    aten.max.default: keep_bound,
    aten.amax.default: keep_bound,
    aten._to_copy.default: keep_bound,
    aten.sum.default: note_count,
    aten.sum.dim_IntList: note_count,
    aten.count_nonzero.default: note_count,
    aten.count_nonzero.dim_IntList: note_count,
    aten.min.dim: note_choice(1),
    aten.isnan.default: assume_uniform(0),
    aten.isinf.default: assume_uniform(0),
    aten.eq.Tensor: compared(1),
    aten.ne.Tensor: compared(0),
    aten.eq.Scalar: compared(0),
    aten.ne.Scalar: compared(1),
}
