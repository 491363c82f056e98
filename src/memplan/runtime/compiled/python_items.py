"""What containers, modules, optimizers and functions hold, as pairs of key and value."""

from __future__ import annotations

import enum
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memplan.runtime.compiled.code_lines import is_user_class

MISSING = object()
TENSOR = object()
"""In place of any tensor."""
POSITION = object()
"""Key of how far an iterator has come."""
ORDER = object()
"""Key of the order of a dict's items."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum)
LONGEST = 100_000
"""Items of a sequence that are looked at one by one; of a longer one, its length and ends."""
LARGEST = 1 << 20
"""Bytes of an array of Python's or NumPy's that are looked at; a larger one of NumPy is not."""


def held(value: Any) -> Any:
    """What to keep of a value: not a tensor, whose memory is the step's business."""
    return TENSOR if isinstance(value, torch.Tensor) else value


def same(before: Any, after: Any) -> bool:
    """Whether two values that are not one object come to the same. Containers and objects that are
    others than before do not, but for those that a step makes anew: small, plain ones."""
    if before is TENSOR or before is MISSING or after is MISSING:
        return before is TENSOR and isinstance(after, torch.Tensor)
    if isinstance(before, torch.Tensor):
        return before is after  # in a container that is another one: its place is another, too
    if type(before) is not type(after):
        return False
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) <= LONGEST and all(
            one is two or same(one, two) for one, two in zip(before, after, strict=True)
        )
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(
            same(value, after[key]) for key, value in before.items()
        )
    if isinstance(before, types.MethodType):
        return bool(before == after)
    if isinstance(before, float):
        return bool(before.hex() == after.hex())
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
    return {(type(item), item) if isinstance(item, PLAIN) else id(item): None for item in value}


def slots_of(value: object) -> list[str]:
    """Names of the attributes that lie in slots, of the user's own classes."""
    found: list[str] = []
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        if is_user_class(base):
            found += [slots] if isinstance(slots, str) else [*slots]
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def attributes(value: object, names: list[str]) -> dict[Any, Any]:
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def of_scaler(scaler: torch.amp.GradScaler) -> dict[Any, Any]:
    """But for what it notes within a step, and forgets at its end."""
    return {key: item for key, item in vars(scaler).items() if key != "_per_optimizer_states"}


def of_class(cls: type) -> dict[Any, Any]:
    return {key: item for key, item in vars(cls).items() if key not in _OF_CLASSES}


_OF_CLASSES = {"__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl", "__annotations__"}


def attributes_at(read: Callable[[], dict[Any, Any]], key: Any) -> dict[Any, Any]:
    """Of the tensor that is there now."""
    tensor = read().get(key)
    return dict(vars(tensor)) if isinstance(tensor, torch.Tensor) else {}


def parts_of_functions(functions: list[types.FunctionType]) -> list[Any]:
    return [
        part for one in functions for part in (one.__code__, one.__defaults__, one.__kwdefaults__)
    ]


def functions_by_part(functions: list[types.FunctionType]) -> dict[Any, Any]:
    names = ("code", "defaults", "defaults of keywords")
    keys = [(n, one.__name__, name) for n, one in enumerate(functions) for name in names]
    return {
        f"{name} of {function}#{number}": part
        for (number, function, name), part in zip(keys, parts_of_functions(functions), strict=True)
    }


def types_of(objects: list[tuple[str, object]]) -> list[type]:
    return [type(one) for _, one in objects]


def types_by_name(objects: list[tuple[str, object]]) -> dict[Any, Any]:
    return {f"{where} (its class)": type(one) for where, one in objects}


def of_referent(reference: weakref.ref[torch.Tensor]) -> dict[Any, Any]:
    tensor = reference()
    return {} if tensor is None else dict(vars(tensor))


def global_hooks() -> list[tuple[str, dict[Any, Any]]]:
    """PyTorch's hooks on all modules and on all optimizers."""
    return [
        (name, found)
        for module in ("torch.nn.modules.module", "torch.optim.optimizer")
        for space in (vars(sys.modules[module]),)
        for name, found in space.items()
        if name.startswith("_global_") and "hook" in name and isinstance(found, dict)
    ]


def hooks_on(tensor: torch.Tensor | None) -> int:
    """How many hooks a parameter's gradient has."""
    if tensor is None:
        return 0
    return len(tensor._backward_hooks or ()) + len(tensor._post_accumulate_grad_hooks or ())


def tensor_hooks(own: dict[str, Any]) -> dict[str, Any]:
    return {name: hooks_on(item) for name, item in own["_parameters"].items()}


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


def ids_of_state(optimizer: torch.optim.Optimizer) -> list[int]:
    """Which dicts hold its state: `load_state_dict` makes new ones."""
    return [id(optimizer.state), *map(id, optimizer.state.values())]


def state_ids(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return dict(enumerate(ids_of_state(optimizer)))


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
    known = isinstance(value, PLAIN) or (
        isinstance(value, (list, tuple)) and all(isinstance(item, PLAIN) for item in value)
    )
    text = repr(value) if known else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "…"
