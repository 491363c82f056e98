"""Where the tensors that are there before a step are kept."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memplan.runtime.compiled.code_lines import is_of_user, names_in
from memplan.runtime.compiled.generators import is_default
from memplan.runtime.compiled.program import By, Kind, Place

_MOST_OBJECTS = 200_000


@dataclass(frozen=True, eq=False)
class Found:
    """A tensor and where it is kept."""

    tensor: torch.Tensor
    kind: Kind
    place: Place


class Places:
    """Finds tensors by their storage: those of the model, of the optimizer and of the arguments,
    and what the step's code can reach."""

    def __init__(
        self,
        step: Callable[..., Any],
        models: list[nn.Module],
        optimizers: list[Optimizer],
        arguments: list[Any],
    ) -> None:
        self.step = step
        self.known: list[tuple[Kind, Place]] = []
        self._names: dict[int, str] = {}
        self._by_storage: dict[int, list[tuple[Kind, Place, weakref.ref[Any]]]] = {}
        self._optimizers = optimizers
        self._ids: set[int] = set()
        self._filled: set[tuple[int, Any]] = set()
        """Places that are known, by their owner and key."""
        self.generators: list[torch.Generator] = []
        """Random generators that were there before the step, but for the devices' defaults."""
        self.given: list[tuple[Place, torch.Tensor]] = []
        """Tensors among the arguments."""
        self.gradients: list[tuple[Place, torch.Tensor]] = []
        """Places of `.grad`, and the parameters that they belong to."""
        for number, model in enumerate(models):
            self._model("model" if len(models) == 1 else f"model[{number}]", model)
        for number, optimizer in enumerate(optimizers):
            name = "optimizer" if len(optimizers) == 1 else f"optimizer[{number}]"
            self._optimizer(name, optimizer)
        for number, value in enumerate(arguments):
            place = Place(f"argument {number}", By.ARGUMENT, None, number)
            self._add(Kind.ARGUMENT, place, value)
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self.given.append((place, value))
            if isinstance(value, torch.Generator):
                self.generators.append(value)
        roots = [("step", step), *(("model", model) for model in models)]
        roots += [(f"argument {number}", value) for number, value in enumerate(arguments)]
        for place, value in reachable(roots):
            if isinstance(value, torch.Generator):
                self.generators.append(value)
            elif not isinstance(value, nn.Parameter) or id(value) not in self._ids:
                self._add(Kind.REACHED, place, value)
                self._parameter(place.path, value)
        self.generators = [one for one in self.generators if not is_default(one)]

    def look(self) -> Before:
        """How everything known is now."""
        return Before(self, self._optimizers)

    def aliases(self) -> list[list[Alias]]:
        """Of each storage that lies in several places: these places, and which view each has."""
        groups = []
        for held in self._by_storage.values():
            pairs = [(place, reference()) for _, place, reference in held]
            group = [(place, view_of(tensor)) for place, tensor in pairs if tensor is not None]
            if len(group) > 1:
                groups.append(group)
        return groups

    def find(self, tensor: torch.Tensor) -> Found | None:
        """What is kept on the tensor's storage, the same view of it where there is one."""
        key = tensor.untyped_storage()._cdata
        best = None
        for kind, place, reference in self._by_storage.get(key, ()):
            held = reference()
            if held is None or held.untyped_storage()._cdata != key:
                continue
            found = Found(held, kind, place)
            if _same_view(held, tensor):
                return found
            best = best or found
        return best

    def _add(self, kind: Kind, place: Place, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            filled = (id(place.owner), repr(place.key))
            if place.by is not By.ARGUMENT and filled in self._filled:
                return
            self._filled.add(filled)
            self.known.append((kind, place))
            self._ids.add(id(value))
            key = value.untyped_storage()._cdata
            self._by_storage.setdefault(key, []).append((kind, place, weakref.ref(value)))

    def _model(self, name: str, model: nn.Module) -> None:
        for prefix, module in model.named_modules():
            start = f"{name}.{prefix}." if prefix else f"{name}."
            for kind, held in (
                (Kind.PARAMETER, module._parameters),
                (Kind.BUFFER, module._buffers),
            ):
                for key, tensor in held.items():
                    if tensor is not None:
                        self._add(kind, Place(start + key, By.ITEM, held, key), tensor)
                        self._parameter(start + key, tensor)

    def _parameter(self, name: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = name
            if tensor.is_leaf and tensor.requires_grad:
                place = Place(f"{name}.grad", By.ATTRIBUTE, tensor, "grad")
                self.gradients.append((place, tensor))
                self._add(Kind.GRADIENT, place, tensor.grad)

    def _optimizer(self, name: str, optimizer: Optimizer) -> None:
        for number, group in enumerate(optimizer.param_groups):
            where = f"{name}.param_groups[{number}]"
            for place_in, parameter in enumerate(group["params"]):
                path = f"{where}['params'][{place_in}]"
                if id(parameter) not in self._names:
                    self._add(
                        Kind.PARAMETER, Place(path, By.ITEM, group["params"], place_in), parameter
                    )
                    self._parameter(path, parameter)
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    place = Place(f"{where}[{key!r}]", By.ITEM, group, key)
                    self._add(Kind.OPTIMIZER_STATE, place, value)
        for parameter, state in optimizer.state.items():
            owner = self._names.get(id(parameter), "…")
            if isinstance(state, dict):
                for key, value in state.items():
                    place = Place(f"{name}.state[{owner}][{key!r}]", By.ITEM, state, key)
                    self._add(Kind.OPTIMIZER_STATE, place, value)


View = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
Alias = tuple[Place, View]


def view_of(tensor: torch.Tensor) -> View:
    return tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())


def _same_view(one: torch.Tensor, two: torch.Tensor) -> bool:
    return view_of(one) == view_of(two)


def reachable(roots: list[tuple[str, Any]]) -> Iterator[tuple[Place, Any]]:
    """Tensors and random generators in closures, in globals that the code names, and in attributes
    and items of these."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting and len(seen) < _MOST_OBJECTS:
        path, value = waiting.pop()
        if id(value) in seen or value is None:
            continue
        seen.add(id(value))
        for place, item in _items(path, value):
            if isinstance(item, (torch.Tensor, torch.Generator)):
                yield place, item
            elif not isinstance(item, (bool, int, float, str, bytes, type)):
                waiting.append((place.path, item))


def _items(path: str, value: Any) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, types.MethodType):
        yield Place(path, By.ATTRIBUTE, value, "__self__"), value.__self__
        yield Place(path, By.ATTRIBUTE, value, "__func__"), value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _in_function(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield (
                Place(f"{path}[{key!r}]" if isinstance(key, str) else path, By.ITEM, value, key),
                item,
            )
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield Place(f"{path}[{number}]", By.ITEM, value, number), item
    elif not isinstance(value, (types.ModuleType, type)) and hasattr(value, "__dict__"):
        for name, item in vars(value).items():
            yield Place(f"{path}.{name}", By.ATTRIBUTE, value, name), item


def _in_function(function: types.FunctionType) -> Iterator[tuple[Place, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield Place(name, By.ATTRIBUTE, cell, "cell_contents"), cell.cell_contents
        except ValueError:
            continue
    for number, item in enumerate(function.__defaults__ or ()):
        yield (
            Place(f"a default of {function.__name__}", By.ITEM, function.__defaults__, number),
            item,
        )
    for key, item in (function.__kwdefaults__ or {}).items():
        yield Place(f"{key} of {function.__name__}", By.ITEM, function.__kwdefaults__, key), item
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield Place(function.__name__, By.ATTRIBUTE, function, "__wrapped__"), wrapped
    if is_of_user(function):
        space = function.__globals__
        for name in sorted(names_in(function.__code__) & space.keys()):
            yield Place(name, By.ITEM, space, name), space[name]


class Was:
    """Which memory a tensor showed, without holding it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.requires_grad = tensor.requires_grad
        self._storage = weakref.ref(tensor.untyped_storage())
        self._view = (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def is_now(self, tensor: Any) -> bool:
        storage = self._storage()
        return (
            isinstance(tensor, torch.Tensor)
            and storage is not None
            and tensor.untyped_storage()._cdata == storage._cdata
            and self._view
            == (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        )


class Before:
    """How things were before the step."""

    def __init__(self, places: Places, optimizers: list[Optimizer]) -> None:
        self.gradients = [
            (place, None if parameter.grad is None else Was(parameter.grad))
            for place, parameter in places.gradients
            if parameter.grad is None or parameter.grad.layout is torch.strided
        ]
        self.tensors = [
            (kind, place, Was(place.read()))
            for kind, place in places.known
            if kind not in (Kind.GRADIENT, Kind.ARGUMENT)
        ]
        self.arguments = [(place, tensor, Was(tensor)) for place, tensor in places.given]
        self._optimizers = optimizers
        self._state = self._state_keys()

    def new_state(self) -> Iterator[str]:
        """Names in the optimizers' states that were not there."""
        yield from (str(key) for _, key in self._state_keys() - self._state)

    def _state_keys(self) -> set[tuple[int, Any]]:
        return {
            (id(parameter), key)
            for optimizer in self._optimizers
            for parameter, state in optimizer.state.items()
            if isinstance(state, dict)
            for key in state
        }
