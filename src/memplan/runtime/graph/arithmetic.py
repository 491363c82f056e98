"""Records a parameter's update: the operators that `torch.optim`'s own code runs on meta tensors.

They become code of their own (`update_program`), in which temporaries and the gradient are freed at
their last use. Python numbers among their arguments (learning rate, bias corrections) are not part
of it: the optimizer's code runs again on meta tensors before each step, and gives the new ones.
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
"""Names a tensor: ("parameter",), ("gradient",), ("state", key) or ("made", operation, place)."""
PARAMETER: Token = ("parameter",)
GRADIENT: Token = ("gradient",)
DEVICE: Token = ("device",)
"""The parameter's device."""


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor in an operator's arguments, or for a Python float: ("number", index)."""

    token: Token


@dataclass(frozen=True)
class Operation:
    """A call of an operator."""

    func: Any
    arguments: tuple[Any, ...]
    """Leaves of args and kwargs, with a `Ref` for each tensor and float."""
    spec: Any
    """The structure of args and kwargs."""
    same_as: int | None
    """The index of the leaf that an in-place operator returns."""


@dataclass
class Arithmetic:
    """The update of one parameter."""

    operations: list[Operation] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    """The result of each operation, as meta tensors."""
    state: tuple[str, ...] = ()
    """Keys of the tensors in the parameter's optimizer state."""
    initial_state: tuple[torch.Tensor, ...] = ()
    """Meta tensors like these."""
    scalars: tuple[Any, ...] = ()
    """The values in the state on which the numbers may depend."""

    def same_operations(self, other: Arithmetic) -> bool:
        """Whether only the numbers differ."""
        return self.operations == other.operations and self.state == other.state


def one_tensor_at_a_time(group: dict[str, Any], parameter: torch.Tensor) -> bool:
    """Whether an optimizer's step runs the same operators for this parameter as on meta tensors:
    no fused or foreach kernels."""
    if group.get("fused") or group.get("capturable") or group.get("differentiable"):
        return False
    foreach = group.get("foreach")
    return foreach is False or (foreach is None and parameter.device.type == "cpu")


@contextlib.contextmanager
def outside_compilation() -> Iterator[None]:
    """Inside, optimizers behave as in a plain step although PyTorch's compiler is at work, under
    which they would keep numbers in tensors."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        with _disable_current_modes(), torch.no_grad():
            yield
    finally:
        torch.compiler._is_compiling_flag = before


Update = Callable[[dict[str, Any], nn.Parameter, Any], None]
"""Runs an optimizer for a parameter, with the options of a group and an optimizer state."""


def arithmetic(
    step: Update,
    begin: Update,
    group: dict[str, Any],
    parameter: torch.Tensor,
    state: dict[str, Any],
    *,
    known: Arithmetic | None = None,
) -> Arithmetic | None:
    """Record a parameter's update. None where it cannot be recorded: it creates more state, or uses
    other tensors.

    `step` updates a parameter; `begin` creates the state that its first update needs. `known`: an
    earlier result, which saves time where it is still right.
    """
    if not one_tensor_at_a_time(group, parameter):
        return None
    with outside_compilation():
        model = nn.Parameter(meta_like(parameter))
        model.grad = meta_like(parameter)
        held = {key: _shadow(value) for key, value in state.items()}
        states: Any = defaultdict(dict, {model: held})
        try:
            if not state:
                begin(group, model, states)
            return _recorded(step, group, model, states, known)
        except Exception:
            return None


def _recorded(
    step: Update, group: dict[str, Any], model: nn.Parameter, states: Any, known: Arithmetic | None
) -> Arithmetic | None:
    state = states[model]
    keys, before = set(state), copy.deepcopy(_non_tensors(state))
    recorder = _Recorder(model, state, known)
    with recorder:
        step(group, model, states)
    if recorder.refused or before != _non_tensors(state) or len(states) != 1 or set(state) != keys:
        return None
    return recorder.found


def _non_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """The items that are no tensors."""
    return {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}


def scalars(state: dict[str, Any]) -> tuple[Any, ...]:
    """The values in a parameter's state on which the numbers of its update may depend."""
    return tuple(
        value.item() if isinstance(value, torch.Tensor) else value
        for value in state.values()
        if not isinstance(value, torch.Tensor) or value.dim() == 0
    )


def meta_like(like: torch.Tensor) -> torch.Tensor:
    """A meta tensor such as `empty_like` makes of another tensor."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return made if like.is_contiguous() else torch.empty_like(made)  # which takes 50 times as long


def _shadow(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.clone() if value.dim() == 0 else meta_like(value)


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
        self.found.initial_state = tuple(map(meta_like, held.values()))

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
        """The known operation of this number, if this is the same one and its result is a meta
        tensor, so that nothing has to be computed."""
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
            return Ref(self._tokens.get(id(leaf), ("?",)))
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return Ref(DEVICE)
        if type(leaf) is float:
            self.found.numbers.append(leaf)
            return Ref(("number", len(self.found.numbers) - 1))
        return leaf
