"""Numbers that a step reads from tensors and hyperparameters, as its Python sees them.

They are symbolic numbers of PyTorch, so operators take them, and pass for Python's own wherever
Python looks: `isinstance(x, float)` is true, arithmetic gives the same doubles and exceptions,
NumPy, `copy` and `pickle` find plain numbers in them. What a graph can do (arithmetic, rounding)
becomes nodes; where the value itself is asked for (a comparison, a conversion, a text), the
recorder is told and a plain number is given. Only `type(x) is float` is false of them, which
`type_tests` looks for in code before it runs.

They are no floats for C, on purpose: C code would read the value of a subclass of float unseen.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memplan.runtime.compiled.scalars import Scalar, Symbolic, result_of, scalar_of

_EXACT = (float, int, bool)
_NODES: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OTHERS: dict[str, Callable[..., Any]] = {
    "divmod": divmod,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
_ONE: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "round": round,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
}
_CONVERSIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "bool": (bool, "a branch on the value of a tensor"),
    "complex": (complex, "a number read from a tensor used as a complex number"),
    "float": (float, "a number read from a tensor used as a Python float"),
    "int": (int, "a number read from a tensor used as a Python int"),
    "invert": (operator.invert, "a number read from a tensor used as a Python int"),
    "hash": (hash, "a number read from a tensor used as a key"),
    "repr": (repr, "a number read from a tensor turned into text"),
    "str": (str, "a number read from a tensor turned into text"),
    "format": (format, "a number read from a tensor turned into text"),
}


class _Number:
    """What `Float` and `Int` have in common."""

    node: Scalar

    def _value(self, how: str) -> Any:
        """The value itself: it gets out of the recorder's sight."""
        return self.node.escape(how)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(self.__class__, name):
            raise AttributeError(f"'{self.__class__.__name__}' object has no attribute '{name}'")
        return getattr(self._value(f"{name} of a number read from a tensor"), name)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self._value("a number read from a tensor pickled")
        return type(value), (value,)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy

        return numpy.array(self._value(_TO_NUMPY), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        inputs = tuple(one._value(_TO_NUMPY) if isinstance(one, _Number) else one for one in inputs)
        return getattr(ufunc, method)(*inputs, **kwargs)


_TO_NUMPY = "a number read from a tensor given to NumPy"


class Float(_Number, torch.SymFloat):
    """A float. `isinstance` and `numbers.Number` ask an object for its class where its type says
    no; who calls that type (`type(x)(3)`) gets a plain float."""

    __class__ = property(lambda self: float)

    def __new__(cls, *given: Any) -> Any:
        return object.__new__(cls) if _is_scalar(given) else float(*given)


class Int(_Number, torch.SymInt):
    """An int."""

    __class__ = property(lambda self: int)

    def __new__(cls, *given: Any) -> Any:
        return object.__new__(cls) if _is_scalar(given) else int(*given)

    def __index__(self) -> int:
        return int(self._value("a number read from a tensor used as a Python int"))


def _is_scalar(given: tuple[Any, ...]) -> bool:
    return len(given) == 1 and isinstance(given[0], Scalar)


def look_alike(scalar: Scalar) -> Any:
    """What the step's Python gets for a number. Nothing passes for a bool: of one, the value."""
    if scalar.is_bool():
        return scalar.escape("a branch on the value of a tensor")
    kind: Any = Float if scalar.is_float() else Int
    made = kind(scalar)
    _alive[id(made)] = made
    return made


_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def alive(recorder: Any) -> list[Any]:
    """Those of one recording that somebody still holds."""
    return [number for number in _alive.values() if number.node.recorder is recorder]


def _given(result: Any) -> Any:
    return look_alike(result) if isinstance(result, Scalar) else result


def _binary(function: Callable[..., Any], swapped: bool, node: bool) -> Callable[..., Any]:
    def method(self: Any, other: Any, *modulus: Any) -> Any:
        scalar = scalar_of(other) if isinstance(other, Symbolic) else None
        exact = scalar is not None or type(other) in _EXACT
        if not exact and hasattr(type(other), "__torch_function__"):
            return NotImplemented
        pair = (other if scalar is None else scalar, self.node)
        if node and exact and not modulus:
            return _given(result_of(function, pair if swapped else pair[::-1]))
        if other is None or (function in _EQUAL and isinstance(other, _NO_NUMBERS)):
            return NotImplemented
        value = self._value(f"{function.__name__}() of a number read from a tensor")
        other = other if scalar is None else scalar.escape("a number read from a tensor")
        if modulus:
            return pow(value, other, *modulus)
        return function(other, value) if swapped else function(value, other)

    return method


_EQUAL = (operator.eq, operator.ne)
_NO_NUMBERS = (str, list, tuple, dict)


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        return _given(result_of(function, (self.node, *others)))

    return method


def _conversion(function: Callable[..., Any], how: str) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        return function(self._value(how), *others)

    return method


def _escaping(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(self._value(f"{name}() of a number read from a tensor"), name)(*args)

    return method


for _kind, _plain in ((Float, float), (Int, int)):
    for _name, _function in (_NODES | _OTHERS).items():
        setattr(_kind, f"__{_name}__", _binary(_function, False, _name in _NODES))
        setattr(_kind, f"__r{_name}__", _binary(_function, True, _name in _NODES))
    for _name in _COMPARISONS:
        setattr(_kind, f"__{_name}__", _binary(getattr(operator, _name), False, True))
    for _name, _function in _ONE.items():
        setattr(_kind, f"__{_name}__", _unary(_function))
    for _name, (_function, _how) in _CONVERSIONS.items():
        setattr(_kind, f"__{_name}__", _conversion(_function, _how))
    for _name in vars(_plain):
        if not _name.startswith("_") and callable(getattr(_plain, _name)):
            setattr(_kind, _name, _escaping(_name))


def as_given(value: Any) -> Any:
    """A symbolic number that PyTorch gives, as the step's Python is to see it."""
    if type(value) in Symbolic and (scalar := scalar_of(value)) is not None:
        return look_alike(scalar)
    return value


def escaped(value: Any) -> Any:
    """The same with plain numbers in nested lists and dicts; the recorder is told."""
    if isinstance(value, Symbolic):
        scalar = scalar_of(value)
        how = "a number read from a tensor turned into text"
        return value if scalar is None else scalar.escape(how)
    if isinstance(value, (list, tuple)):
        items = [escaped(item) for item in value]
        unchanged = all(item is before for item, before in zip(items, value, strict=True))
        return value if unchanged else items
    if isinstance(value, dict):
        pairs = {escaped(key): escaped(item) for key, item in value.items()}
        parts = zip((*pairs, *pairs.values()), (*value, *value.values()), strict=True)
        return value if all(item is before for item, before in parts) else pairs
    return value


def of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of plain numbers that becomes a node where it is given symbolic ones."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        operands = [scalar_of(one) or one for one in args]
        known = [isinstance(one, Scalar) for one in operands]
        if not any(known) or any(type(one) not in (Scalar, *_EXACT) for one in operands):
            return function(*args)
        return _given(result_of(function, tuple(operands)))

    return call
