"""The arithmetic of a parameter's update: `torch.optim`'s own code, run on tensors without memory.

What it does to them becomes operators of the step's graph, so that each temporary is freed, and the
gradient too, as soon as it is not needed. Python numbers in it (learning rate, bias corrections)
are no part of the graph: they come from a run of that code before each step.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ITEM = torch.ops.aten._local_scalar_dense.default
Token = tuple[Hashable, ...]
"""A tensor: ("parameter",), ("gradient",), ("state", key), ("made", operator, place)."""
PARAMETER: Token = ("parameter",)
GRADIENT: Token = ("gradient",)
DEVICE: Token = ("device",)
"""That of the parameter."""


@dataclass(frozen=True)
class Named:
    """In an operator's arguments: a tensor, or the number of a Python float among all."""

    token: Token


@dataclass(frozen=True)
class Operation:
    func: Any
    arguments: tuple[Any, ...]
    """Leaves of args and kwargs; tensors and floats are `Named`."""
    spec: Any
    same_as: int | None
    """The leaf that the result is, of an operator in place."""


@dataclass
class Arithmetic:
    """Of one parameter."""

    operations: list[Operation] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    """Of each operation, with tensors that have no memory."""
    state: tuple[str, ...] = ()
    """Keys of the tensors of the optimizer's state."""
    begins_with: tuple[torch.Tensor, ...] = ()
    """What these are like, without memory."""
    scalars: tuple[Any, ...] = ()
    """What of the state decided on the numbers."""

    def like(self, other: Arithmetic) -> bool:
        """Whether only the numbers differ."""
        return self.operations == other.operations and self.state == other.state


def one_tensor_at_a_time(group: dict[str, Any], parameter: torch.Tensor) -> bool:
    """Whether an optimizer's step uses the operators that it uses without memory, too."""
    if group.get("fused") or group.get("capturable") or group.get("differentiable"):
        return False
    foreach = group.get("foreach")
    return foreach is False or (foreach is None and parameter.device.type == "cpu")


@contextlib.contextmanager
def as_in_a_step() -> Iterator[None]:
    """Have an optimizer do what it does in a step, though PyTorch's compiler may be at work: it
    would keep numbers in tensors."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        with _disable_current_modes(), torch.no_grad():
            yield
    finally:
        torch.compiler._is_compiling_flag = before


Update = Callable[[dict[str, Any], nn.Parameter, Any], None]
"""Runs an optimizer for a parameter with this group and these states."""


def arithmetic(
    step: Update,
    begin: Update,
    group: dict[str, Any],
    parameter: torch.Tensor,
    state: dict[str, Any],
    *,
    known: Arithmetic | None = None,
    ahead: bool = False,
) -> Arithmetic | None:
    """What an update does; None where that cannot be said: it makes more state, or touches more.

    `step` updates a parameter; `begin` makes the state that it begins with, if there is none.
    `known`: what it is likely to be, which saves time. `ahead`: where the first update is another
    one than the rest, the second is asked for.
    """
    if not one_tensor_at_a_time(group, parameter):
        return None
    with as_in_a_step():
        model = nn.Parameter(without_memory(parameter))
        model.grad = torch.empty_like(model)
        held = {key: _shadow(value) for key, value in state.items()}
        states: Any = defaultdict(dict, {model: held})
        try:
            if not state:
                begin(group, model, states)
            found = _recorded(step, group, model, states, known)
            if found is None and ahead and not state:
                found = _recorded(step, group, model, states, None)
        except Exception:
            return None
    return found


def _recorded(
    step: Update, group: dict[str, Any], model: nn.Parameter, states: Any, known: Arithmetic | None
) -> Arithmetic | None:
    state = states[model]
    keys, before = set(state), copy.deepcopy(_other(state))
    recorder = _Recorder(model, state, known)
    with recorder:
        step(group, model, states)
    if recorder.refused or before != _other(state) or len(states) != 1 or set(state) != keys:
        return None
    return recorder.found


def _other(state: dict[str, Any]) -> dict[str, Any]:
    """What is no tensor."""
    return {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}


def scalars(state: dict[str, Any]) -> tuple[Any, ...]:
    """What of a parameter's state decides on the numbers of its update."""
    return tuple(
        value.item() if isinstance(value, torch.Tensor) else value
        for value in state.values()
        if not isinstance(value, torch.Tensor) or value.dim() == 0
    )


def without_memory(like: torch.Tensor) -> torch.Tensor:
    """A plain tensor that lies as another, which may be a fake one."""
    lies = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return torch.empty_like(lies)


def _shadow(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.clone() if value.dim() == 0 else without_memory(value)


class _Recorder(TorchDispatchMode):
    def __init__(
        self, model: nn.Parameter, state: dict[str, Any], known: Arithmetic | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Arithmetic(scalars=scalars(state))
        self.refused = False
        self._known = known
        self._tokens: dict[int, Token] = {}
        self._alive: list[torch.Tensor] = []
        assert model.grad is not None
        self._name(model, PARAMETER)
        self._name(model.grad, GRADIENT)
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                self._name(value, ("state", key))
        held = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        self.found.state = tuple(held)
        self.found.begins_with = tuple(map(without_memory, held.values()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ITEM:
            self.refused |= self._tokens.get(id(args[0]), ("made",))[0] == "made"
            return func(*args)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = tuple(self._argument(leaf) for leaf in leaves)
        number = len(self.found.operations)
        operation = self._as_known(number, func, given, spec)
        if operation is None:
            result = func(*args, **kwargs)
            same_as = next((place for place, leaf in enumerate(leaves) if leaf is result), None)
            operation = Operation(func, given, spec, same_as)
        elif operation.same_as is not None:
            result = leaves[operation.same_as]
        else:
            assert self._known is not None
            result = self._known.results[number].detach()
        self.refused |= not isinstance(result, torch.Tensor)
        for place, one in enumerate(pytree.tree_leaves(result)):
            if isinstance(one, torch.Tensor) and id(one) not in self._tokens:
                self._name(one, ("made", number, place))
        self.found.operations.append(operation)
        self.found.results.append(result)
        return result

    def _as_known(self, number: int, func: Any, given: Any, spec: Any) -> Operation | None:
        """The operation of this place, if it is this one and has nothing to compute."""
        if self._known is None or number >= len(self._known.operations):
            return None
        operation, result = self._known.operations[number], self._known.results[number]
        same = operation.func is func and operation.arguments == given and operation.spec == spec
        return operation if same and result.is_meta else None

    def _name(self, tensor: torch.Tensor, token: Token) -> None:
        self._tokens[id(tensor)] = token
        self._alive.append(tensor)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            self.refused |= id(leaf) not in self._tokens
            return Named(self._tokens.get(id(leaf), ("?",)))
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return Named(DEVICE)
        if type(leaf) is float:
            self.found.numbers.append(leaf)
            return Named(("number", len(self.found.numbers) - 1))
        return leaf
