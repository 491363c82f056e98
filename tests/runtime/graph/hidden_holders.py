"""More ways of holding a number: what PyTorch's compiler runs instead of following it, caches of
functions, classes that are reached through closures, what is found in two places at once."""

from __future__ import annotations

import codecs
import enum
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.runtime.graph.holders import Holder, holder

# What is called instead of followed


@holder
def member_that_is_missing() -> Holder:
    held = [1.0]

    class Factor(enum.Enum):
        one, two, half = 1.0, 2.0, 0.5

        @classmethod
        def _missing_(cls, _value: object) -> Factor:
            return cls(held[0])

    return lambda: Factor("missing").value, lambda value: held.__setitem__(0, value)


@holder
def iteration_over_a_class() -> Holder:
    held = [1.0]

    class Meta(type):
        def __iter__(cls) -> Any:
            return iter(held)

    class Held(metaclass=Meta):
        pass

    return lambda: sum(Held), lambda value: held.__setitem__(0, value)


@holder
def subscript_of_a_class() -> Holder:
    held = [1.0]

    class Held:
        def __class_getitem__(cls, _key: object) -> float:
            return held[0]

    asked: Any = Held
    return lambda: asked[0], lambda value: held.__setitem__(0, value)


@holder
def handler_of_a_codec() -> Holder:
    held = [1.0]
    codecs.register_error("memplan-test", lambda error: (str(held[0]), error.end))  # type: ignore[attr-defined]
    return (
        lambda: float("é".encode("ascii", "memplan-test").decode()),
        lambda value: held.__setitem__(0, value),
    )


@holder
def function_allowed_in_graphs() -> Holder:
    held = [1.0]

    def function(x: Tensor) -> Tensor:
        return x * held[0]

    torch.compiler.allow_in_graph(function)
    one = torch.ones(())
    return lambda: function(one), lambda value: held.__setitem__(0, value)


_OPERATORS = torch.library.Library("memplan_test_holders", "FRAGMENT")
_made: list[str] = []


def operator_of_ones_own(**kernels: Callable[..., Any]) -> Any:
    """An operator of one tensor, with kernels by their dispatch keys."""
    name = f"of_{len(_made)}"
    _made.append(name)
    _OPERATORS.define(f"{name}(Tensor x) -> Tensor")
    for key, kernel in kernels.items():
        _OPERATORS.impl(name, kernel, key)
    return getattr(torch.ops.memplan_test_holders, name)


@holder
def operator_made_of_others() -> Holder:
    held, one = [1.0], torch.ones(())
    function = operator_of_ones_own(CompositeImplicitAutograd=lambda x: x * held[0])
    return lambda: function(one), lambda value: held.__setitem__(0, value)


# Caches of functions


@holder
def cache_that_keeps_the_first() -> Holder:
    held = [1.0]

    @functools.cache
    def cached() -> float:
        return held[0]

    def put(value: float) -> None:
        held[0] = value
        if value < 1:
            cached.cache_clear()

    return lambda: cached(), put


@holder
def cached_random_number() -> Holder:
    @functools.cache
    def cached() -> Tensor:
        return torch.rand(())

    return lambda: cached(), lambda _value: None


# Classes that are found through closures


class First:
    pass


class Second(First):
    pass


def one_class_of(first: Any, second: Any, ask: Callable[[Any], float]) -> Holder:
    held = types.SimpleNamespace(kind=first)
    return (
        lambda: ask(held.kind),
        lambda value: setattr(held, "kind", second if value > 1 else first),
    )


@holder
def which_class() -> Holder:
    return one_class_of(First, Second, lambda kind: 2.0 if kind is Second else 1.0)


@holder
def which_subclass() -> Holder:
    return one_class_of(First, Second, lambda kind: 2.0 if issubclass(kind, Second) else 1.0)


@holder
def class_of_an_instance() -> Holder:
    made = nn.Tanh()
    return one_class_of(nn.ReLU, nn.Tanh, lambda kind: 2.0 if isinstance(made, kind) else 1.0)


@holder
def name_of_a_class() -> Holder:
    return one_class_of(First, Second, lambda kind: 2.0 if "Second" in repr(kind) else 1.0)


@holder
def place_of_a_class() -> Holder:
    return one_class_of(First, Second, lambda kind: 1.0 + [First, Second].index(kind))


class Members(enum.Enum):
    first, second = 1, 2


@holder
def member_as_a_key() -> Holder:
    numbers = {Members.first: 1.0, Members.second: 2.0}
    return one_class_of(Members.first, Members.second, numbers.__getitem__)


# What is found in two places: a local variable, and a global one

LIST = [1.0]
TENSOR = torch.ones(())
MODULE = nn.Linear(1, 1)


def also_global(is_global: Any, other: Any, ask: Callable[[Any], Any]) -> Holder:
    held = types.SimpleNamespace(one=is_global)
    return (
        lambda: ask(held.one),
        lambda value: setattr(held, "one", other if value > 1 else is_global),
    )


@holder
def list_that_is_a_global_too() -> Holder:
    return also_global(LIST, [2.0], lambda one: LIST[0] * one[0])


@holder
def tensor_that_is_a_global_too() -> Holder:
    return also_global(TENSOR, torch.full((), 2.0), lambda one: TENSOR * one)


@holder
def module_that_is_a_global_too() -> Holder:
    return also_global(MODULE, nn.Linear(1, 1), lambda one: 1.0 if one is MODULE else 2.0)


# Of tensors


@holder
def tensor_s_base() -> Holder:
    whole = torch.ones(8)
    held = types.SimpleNamespace(part=whole[:1])

    def put(value: float) -> None:
        held.part = torch.ones(1) if value > 1 else whole[:1]

    return lambda: 2.0 if held.part._base is None else 1.0, put


@holder
def kernel_of_attention() -> Holder:
    query = torch.linspace(-1, 1, 1280).view(1, 1, 40, 32)

    def read() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, query, query).sum()

    def put(value: float) -> None:
        torch.backends.cuda.enable_flash_sdp(value > 1)

    return read, put


@holder
def maps_of_an_enumeration() -> Holder:
    class Held(enum.Enum):
        ONE = 1.0
        TWO = 2.0
        HALF = 0.5

    def put(value: float) -> None:
        Held._member_map_["ONE"] = Held._value2member_map_[1.0] = Held._value2member_map_[value]

    put(1.0)
    return lambda: float(Held["ONE"].value + Held(1.0).value) / 2, put


# What `super` finds


@holder
def attribute_above_a_new_object() -> Holder:
    class Above:
        factor = 1.0
        factors: ClassVar[list[float]] = [1.0]

    class Held(Above):
        def read(self) -> float:
            return super().factor + super().factors[0]

    def put(value: float) -> None:
        Above.factor = Above.factors[0] = value

    return lambda: Held().read(), put


@holder
def attribute_of_a_class_between() -> Holder:
    class Above:
        factor = 1.0

    class Between(Above):
        pass

    class Held(Between):
        def read(self) -> float:
            return super().factor

    held = Held()

    def put(value: float) -> None:
        if value == 2:
            Between.factor = value
        elif "factor" in vars(Between):
            del Between.factor

    return held.read, put


@holder
def attribute_that_counts_as_false() -> Holder:
    class Above:
        factor = 1.0

    class Between(Above):
        factor = 0.0

    class Held(Between):
        def read(self) -> float:
            return super().factor

    held = Held()
    return lambda: held.read() + Above.factor, lambda value: setattr(Above, "factor", value)
