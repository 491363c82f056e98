"""What containers, modules, optimizers and functions hold, as pairs of key and value."""

from __future__ import annotations

import enum
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

MISSING = object()
TENSOR = object()
"""In place of any tensor."""
POSITION = object()
"""Key of how far an iterator has come."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum)
LONGEST = 4096
"""Items of a sequence that are looked at one by one; of a longer one, its length and ends."""
ITERATORS: tuple[type, ...] = (
    types.GeneratorType, type(iter([])), type(iter(())), type(iter(range(0))), type(iter({})),
    type(iter({}.values())), type(iter({}.items())), type(iter("")), enumerate, zip, map, filter,
)  # fmt: skip


def held(value: Any) -> Any:
    """What to keep of a value: not a tensor, whose memory is the step's business."""
    return TENSOR if isinstance(value, torch.Tensor) else value


def same(before: Any, after: Any) -> bool:
    """Whether two values that are not one object come to the same. Containers and objects that are
    others than before do not, but for those that a step makes anew: small, plain ones."""
    if before is TENSOR or before is MISSING or after is MISSING:
        return before is TENSOR and isinstance(after, torch.Tensor)
    if type(before) is not type(after):
        return False
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) <= LONGEST and all(
            one is two or same(held(one), two) for one, two in zip(before, after, strict=True)
        )
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(
            same(held(value), after[key]) for key, value in before.items()
        )
    if isinstance(before, types.MethodType):
        return bool(before == after)
    if isinstance(before, float):
        return before == after or (before != before and after != after)
    if isinstance(before, (*PLAIN, torch.Size, torch.dtype, torch.device, range, slice)):
        return bool(before == after)
    return before is after


def by_key(value: dict[Any, Any]) -> dict[Any, Any]:
    return {key if isinstance(key, PLAIN) else id(key): item for key, item in value.items()}


def some(value: dict[Any, Any], names: list[Any]) -> dict[Any, Any]:
    return {name: value[name] for name in names if name in value}


def some_values(value: dict[Any, Any], names: list[Any]) -> list[Any]:
    return [value[name] for name in names]


def sequence(value: Any) -> dict[Any, Any]:
    if len(value) <= LONGEST:
        return dict(enumerate(value))
    return {"length": len(value), 0: value[0], len(value) - 1: value[-1]}


def as_set(value: Any) -> dict[Any, Any]:
    return {repr(item): None for item in value}


def position(value: Any) -> dict[Any, Any]:
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        plain = [repr(v) for v in frame.f_locals.values() if isinstance(v, PLAIN)] if frame else []
        return {POSITION: (frame.f_lasti if frame else -1, *plain)}
    try:
        _, arguments, *state = value.__reduce__()
    except (TypeError, AttributeError, ValueError):
        return {POSITION: operator.length_hint(value, -1)}
    return {POSITION: state[0] if state else repr(arguments)}


HOOKS = tuple(key for key in vars(torch.nn.Module()) if "hooks" in key)
APART = (*HOOKS, "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def of_all(
    modules: dict[str, dict[str, Any]], read: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[Any, Any]:
    """What `read` gives of each module's attributes, by the module's name."""
    return {
        f"{where}.{name}": value
        for where, own in modules.items()
        for name, value in read(own).items()
    }


def ids(own: dict[str, Any]) -> dict[str, Any]:
    return {name: id(item) for name, item in own["_parameters"].items()}


def ids_in(parameters: list[Any]) -> list[int]:
    return [id(parameter) for parameter in parameters]


def ids_by_place(parameters: list[Any]) -> dict[Any, Any]:
    return dict(enumerate(ids_in(parameters)))


def names(own: dict[str, Any]) -> dict[str, Any]:
    return {name: name for name in own["_buffers"]}


def hooks(own: dict[str, Any]) -> dict[str, Any]:
    return {f"{key}[{number}]": hook for key in HOOKS for number, hook in own.get(key, {}).items()}


def plain_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Plain values in it; tensors are the step's own."""
    return {
        (id(parameter), key): value
        for parameter, state in optimizer.state.items()
        if isinstance(state, dict)
        for key, value in state.items()
        if not isinstance(value, torch.Tensor)
    }


def cells(function: types.FunctionType) -> dict[Any, Any]:
    cells = function.__closure__ or ()
    values = {}
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            values[name] = MISSING
    return values


def words(value: object) -> str:
    if value is MISSING:
        return "not there"
    if value is TENSOR or isinstance(value, torch.Tensor):
        return "a tensor"
    text = repr(value) if isinstance(value, (*PLAIN, list, tuple)) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "…"
