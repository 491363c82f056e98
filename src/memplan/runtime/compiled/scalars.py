"""Python numbers that a step computes from tensors and hyperparameters, recorded as graph nodes.

`tensor.item()` gives PyTorch a symbolic number whose node is a `Scalar`: it knows its value, and
arithmetic on it becomes nodes that do the same arithmetic on Python numbers. So what Adam computes
from its step count is computed anew at each step, in the same doubles. Where the value itself gets
out (a branch, a conversion, a format), the recorder is told. What the step's own Python gets is in
`look_alikes`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.fx.experimental.sym_node  # installs the arithmetic of torch.SymFloat
from torch import fx

from memplan.runtime.compiled.lines import refused_at
from memplan.runtime.compiled.not_capturable import NotCapturable

Symbolic = (torch.SymFloat, torch.SymInt, torch.SymBool)
Number = float | int | bool


class Recorder(Protocol):
    """Who is told, as seen from here."""

    def arithmetic(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.Node:
        """A node that calls `function` on numbers and nodes of numbers."""

    def refuse(self, refusal: NotCapturable) -> None:
        """The step cannot be captured."""

    def escaped(self, scalar: Scalar, how: str) -> None:
        """The value of `scalar` was asked for, by a branch or a conversion."""


class Scalar:
    """A number with its node; what `torch.SymFloat` calls a `SymNode`."""

    def __init__(
        self,
        recorder: Recorder,
        value: Number,
        node: fx.Node | None,
        places: frozenset[int] = frozenset(),
        measured: bool = False,
        test: tuple[Callable[..., Any], Number] | None = None,
        late: bool = False,
    ) -> None:
        self.recorder = recorder
        self.value = value
        self.node = node
        """None: a constant."""
        self.places = places
        """Inputs (by number) that are Python numbers and that it depends on."""
        self.measured = measured
        """Whether it depends on the content of a tensor."""
        self.test = test
        """Of a bool: how an input itself was compared, and with what."""

        self.late = late
        """A constant that a scheduler has set in this step."""

    def check(self, where: str | None = None) -> None:
        """Tells the recorder of a constant that other steps do not have."""
        if self.late:
            self.recorder.refuse(
                NotCapturable(
                    "a hyperparameter read after the scheduler's step",
                    refused_at() if where is None else where,
                    "read it before, or call scheduler.step() outside the step",
                )
            )

    # What PyTorch asks of a node

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return type(self.value) is float

    def is_bool(self) -> bool:
        return type(self.value) is bool

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def maybe_as_int(self) -> int | None:
        return None

    def maybe_as_float(self) -> float | None:
        return None

    def maybe_as_bool(self) -> bool | None:
        return None

    def nested_int(self) -> None:
        return None

    def constant_int(self) -> None:
        return None

    def constant_bool(self) -> None:
        return None

    def has_hint(self) -> bool:
        return True

    def wrap_int(self, value: int) -> Scalar:
        return Scalar(self.recorder, int(value), None)

    def wrap_float(self, value: float) -> Scalar:
        return Scalar(self.recorder, float(value), None)

    def wrap_bool(self, value: bool) -> Scalar:
        return Scalar(self.recorder, bool(value), None)

    def clone(self) -> Scalar:
        return self

    # Where the value gets out

    def escape(self, how: str) -> Number:
        """The value, whose use `how` names."""
        self.check()
        if self.node is not None:
            self.recorder.escaped(self, how)
        return self.value

    def guard_int(self, file: str, line: int) -> int:
        return int(self.escape("a number read from a tensor used as a Python int"))

    def guard_float(self, file: str, line: int) -> float:
        return float(self.escape("a number read from a tensor used as a Python float"))

    def guard_bool(self, file: str, line: int) -> bool:
        return bool(self.escape("a branch on the value of a tensor"))

    guard_size_oblivious = guard_bool
    guard_or_false = guard_bool
    guard_or_true = guard_bool

    def expect_true(self, file: str, line: int) -> bool:
        """`torch._check`: it raises where it fails and decides nothing else."""
        return bool(self.value)

    def expect_size(self, file: str, line: int) -> bool:
        return self.guard_int(file, line) >= 0

    def bool_(self) -> bool:
        return self.guard_bool("", 0)

    def int_(self) -> int:
        return self.guard_int("", 0)

    def _graph_repr(self) -> str:
        return repr(self.escape("a number read from a tensor turned into text"))

    def __repr__(self) -> str:
        return f"Scalar({self.value}, {self.node})"


def result_of(function: Callable[..., Any], operands: tuple[Scalar | Number, ...]) -> Any:
    """What `function` gives of numbers: a Scalar; where no graph can hold it, the plain result.
    Raises what `function` raises."""
    scalars = [one for one in operands if isinstance(one, Scalar)]
    value = function(*(one.value if isinstance(one, Scalar) else one for one in operands))
    for scalar in scalars:
        scalar.check()
    known = [scalar for scalar in scalars if scalar.node is not None]
    if not known:
        return value
    if type(value) not in (float, int, bool):
        for scalar in known:
            scalar.escape(f"a {type(value).__name__} computed from a tensor")
        return value
    arguments = tuple(_argument(one) for one in operands)
    recorder = known[0].recorder
    try:
        node = recorder.arithmetic(function, arguments)
    except NotCapturable as refusal:  # of the recording: the step itself goes on
        recorder.refuse(refusal)
        return value
    return Scalar(
        recorder,
        value,
        node,
        frozenset[int]().union(*(scalar.places for scalar in known)),
        any(scalar.measured for scalar in known),
        _test(function, known[0], arguments) if isinstance(value, bool) else None,
    )


def _argument(operand: Any) -> Any:
    if not isinstance(operand, Scalar):
        return operand
    return operand.value if operand.node is None else operand.node


def _test(
    function: Callable[..., Any], scalar: Scalar, arguments: tuple[Any, ...]
) -> tuple[Callable[..., Any], Number] | None:
    """How an input itself was compared, and with what, if that is all."""
    if len(arguments) != 2 or isinstance(arguments[1], fx.Node):
        return None
    node = scalar.node
    return (function, arguments[1]) if node is not None and node.op == "placeholder" else None


def _result(function: Callable[..., Any], operands: tuple[Scalar, ...]) -> Scalar:
    """For PyTorch, which wants a node."""
    value = result_of(function, operands)
    return value if isinstance(value, Scalar) else Scalar(operands[0].recorder, value, None)


def _escaping(name: str, function: Callable[..., Any]) -> None:
    def method(self: Scalar, *others: Any) -> Any:
        plain = [other.value if isinstance(other, Scalar) else other for other in others]
        value = function(self.escape(f"{name}() of a number read from a tensor"), *plain)
        return Scalar(self.recorder, value, None)

    setattr(Scalar, name, method)


def _integer_if(value: float) -> bool:
    return value.is_integer()


_ESCAPING: dict[str, Callable[..., Any]] = {
    "round": round,
    "is_integer": _integer_if,
    "sym_int": int,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "sym_asin": math.asin,
    "sym_acos": math.acos,
    "sym_atan": math.atan,
}
for _name, _function in _ESCAPING.items():
    _escaping(_name, _function)

for _name in ("__str__", "str"):
    setattr(Scalar, _name, Scalar._graph_repr)


def _define(name: str, function: Callable[..., Any]) -> None:
    def method(self: Scalar, *others: Scalar) -> Scalar:
        return _result(function, (self, *others))

    method.__name__ = name
    setattr(Scalar, name, method)


def sym_min(one: Number, two: Number) -> Number:
    return min(one, two)


def sym_max(one: Number, two: Number) -> Number:
    return max(one, two)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "mod", "neg", "pos", "abs")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **dict.fromkeys(("truediv", "float_truediv", "int_truediv"), operator.truediv),
    **dict.fromkeys(("floordiv", "int_floordiv"), operator.floordiv),
    **dict.fromkeys(("pow", "float_pow", "pow_by_natural"), operator.pow),
    "and_": operator.and_,
    "or_": operator.or_,
    "sym_and": operator.and_,
    "sym_or": operator.or_,
    "sym_not": operator.not_,
    "sym_float": float,
    "sym_min": sym_min,
    "sym_max": sym_max,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "sym_sqrt": math.sqrt,
    "sym_log2": math.log2,
    **{f"sym_{n}": getattr(math, n) for n in ("cos", "sin", "tan", "cosh", "sinh", "tanh", "exp")},
}
for _name, _function in _FUNCTIONS.items():
    if not hasattr(Scalar, _name):
        _define(_name, _function)


def symbolic(scalar: Scalar) -> Any:
    """What the step's Python gets."""
    if scalar.is_bool():
        return torch.SymBool(scalar)
    return torch.SymInt(scalar) if scalar.is_int() else torch.SymFloat(scalar)


def scalar_of(value: Any) -> Scalar | None:
    """The Scalar in a symbolic number, or in a tensor that stands for one."""
    if isinstance(value, torch.Tensor):
        value = getattr(value, "_wrapped_number", None)
    if isinstance(value, Symbolic):
        node = value.node
        return node if isinstance(node, Scalar) else None
    return None
