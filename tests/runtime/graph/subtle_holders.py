"""More ways of holding a number: by which object it is, by what is not there, in functions of
objects that the loss function makes, in settings of libraries."""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import abc
import collections
import copy
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import math
import os
import sys
import tempfile
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.runtime.graph.holders import Holder, holder


class Plain:
    """Equal to nothing but itself."""


def two(make: Any) -> tuple[Any, Any, types.SimpleNamespace]:
    """Two objects and what has one of them."""
    first, second = make(), make()
    return first, second, types.SimpleNamespace(held=first)


def one_of(make: Any, ask: Any) -> Holder:
    """`ask` is told which object is held, and the second one."""
    first, second, has = two(make)

    def put(value: float) -> None:
        has.held = second if value > 1 else first

    return lambda: 2.0 if ask(has.held, second) else 1.0, put


@holder
def which_object() -> Holder:
    return one_of(Plain, lambda held, other: held is other)


@holder
def which_sentinel() -> Holder:
    return one_of(object, lambda held, other: held is other)


@holder
def which_object_is_equal() -> Holder:
    return one_of(Plain, lambda held, other: held == other)


@holder
def which_object_in_a_tuple() -> Holder:
    return one_of(Plain, lambda held, other: (held, 1) == (other, 1))


@holder
def which_module() -> Holder:
    return one_of(lambda: nn.Linear(1, 1), lambda held, other: held is other)


@holder
def hash_of_an_ordinary_object() -> Holder:
    return one_of(Plain, lambda held, other: hash(held) == hash(other))


@holder
def member_of_a_set() -> Holder:
    return one_of(Plain, lambda held, other: other in {held})


@holder
def set_of_objects() -> Holder:
    first, second, held = Plain(), Plain(), set[Any]()

    def put(value: float) -> None:
        held.clear()
        held.add(second if value > 1 else first)

    return lambda: 2.0 if second in held else 1.0, put


@holder
def key_that_is_missing() -> Holder:
    held: dict[str, float] = {}

    def read() -> float:
        try:
            return held["number"]
        except KeyError:
            return 1.0

    def put(value: float) -> None:
        held.clear()
        if value > 1:
            held["number"] = value

    return read, put


@holder
def attribute_that_is_missing() -> Holder:
    held = Plain()

    def read() -> Any:
        try:
            return held.number  # type: ignore[attr-defined]
        except AttributeError:
            return 1.0

    def put(value: float) -> None:
        vars(held).clear()
        if value > 1:
            vars(held)["number"] = value

    return read, put


@holder
def variable_that_is_missing() -> Holder:
    def put(value: float) -> None:
        os.environ.pop("MEMPLAN_OF_A_TEST", None)
        if value > 1:
            os.environ["MEMPLAN_OF_A_TEST"] = "1"

    return lambda: 2.0 if "MEMPLAN_OF_A_TEST" in os.environ else 1.0, put


@holder
def number_of_attributes() -> Holder:
    held = Plain()

    def put(value: float) -> None:
        vars(held).clear()
        vars(held).update({f"a{number}": 0 for number in range(int(2 * value))})

    return lambda: len(vars(held)) / 2, put


def truth_of(make: Any) -> Holder:
    held = make()

    def put(value: float) -> None:
        held.clear()
        if value > 1:
            held["number"] = value

    return lambda: 2.0 if held else 1.0, put


@holder
def truth_of_a_dictionary() -> Holder:
    return truth_of(dict)


@holder
def truth_of_a_defaultdict() -> Holder:
    return truth_of(lambda: collections.defaultdict(dict))


@holder
def copy_of_an_ordered_dictionary() -> Holder:
    held = collections.OrderedDict(number=1.0)
    return lambda: sum(copy.copy(held).values()), lambda value: held.__setitem__("number", value)


@holder
def order_of_an_ordered_dictionary() -> Holder:
    held = collections.OrderedDict(first=1.0, second=2.0)

    def put(value: float) -> None:
        held.move_to_end("first" if value > 1 else "second")

    return lambda: next(iter(held.values())), put


def first_of(**given: float) -> float:
    return next(iter(given.values()))


def order_of_a_dictionary(ask: Any) -> Holder:
    held: dict[str, float] = {}

    def put(value: float) -> None:
        held.clear()
        held.update({"b": 2.0, "a": 1.0} if value > 1 else {"a": 1.0, "b": 2.0})

    return lambda: ask(held), put


@holder
def order_of_keyword_arguments() -> Holder:
    return order_of_a_dictionary(lambda held: first_of(**held))


@holder
def order_of_a_copy() -> Holder:
    return order_of_a_dictionary(lambda held: next(iter(held.copy().values())))


@holder
def order_of_unpacked_keys() -> Holder:
    return order_of_a_dictionary(lambda held: held[(*held,)[0]])


@holder
def item_that_is_popped() -> Holder:
    return order_of_a_dictionary(lambda held: held.popitem()[1])


@holder
def closure_of_a_method_of_a_new_object() -> Holder:
    held = [1.0]

    class Reader:
        def read(self) -> float:
            return held[0]

    return lambda: Reader().read(), lambda value: held.__setitem__(0, value)


@holder
def closure_of_a_constructor() -> Holder:
    held = [1.0]

    class Reader:
        def __init__(self) -> None:
            self.number = held[0]

    return lambda: Reader().number, lambda value: held.__setitem__(0, value)


@holder
def default_of_a_constructor() -> Holder:
    class Reader:
        def __init__(self, number: float = 1.0) -> None:
            self.number = number

    def put(value: float) -> None:
        Reader.__init__.__defaults__ = (value,)

    return lambda: Reader().number, put


@holder
def factory_of_a_field() -> Holder:
    held = [1.0]

    @dataclasses.dataclass
    class Reader:
        number: float = dataclasses.field(default_factory=lambda: held[0])

    return lambda: Reader().number, lambda value: held.__setitem__(0, value)


@holder
def closure_of_an_equality() -> Holder:
    held = [1.0]

    class Compared:
        def __eq__(self, _other: object) -> bool:
            return held[0] > 1

    first, second = Compared(), Compared()
    return lambda: 2.0 if first == second else 1.0, lambda value: held.__setitem__(0, value)


@holder
def instances_by_code() -> Holder:
    held = [1.0]

    class Kind(type):
        def __instancecheck__(cls, _one: object) -> bool:
            return held[0] > 1

    class Large(metaclass=Kind):
        pass

    one = Plain()
    return lambda: 2.0 if isinstance(one, Large) else 1.0, lambda value: held.__setitem__(0, value)


@holder
def shape_of_a_numpy_array() -> Holder:
    held = {"array": np.zeros(2)}

    def put(value: float) -> None:
        held["array"] = np.zeros(int(2 * value))

    return lambda: held["array"].shape[0] / 2, put


@holder
def version_of_a_tensor() -> Holder:
    held = torch.zeros(1)
    return lambda: held._version / 2, lambda value: held.fill_(value)


@holder
def hook_of_all_modules() -> Holder:
    layer, one, handles = nn.Identity(), torch.ones(()), list[Any]()

    def twice(module: nn.Module, _given: Any, result: Tensor) -> Any:
        return result * 2 if module is layer else None

    def put(value: float) -> None:
        while handles:
            handles.pop().remove()
        if value > 1:
            handles.append(nn.modules.module.register_module_forward_hook(twice))

    return lambda: layer(one), put


@holder
def autocast_s_type() -> Holder:
    def put(value: float) -> None:
        torch.set_autocast_dtype("cpu", torch.float16 if value > 1 else torch.bfloat16)

    return lambda: 2.0 if torch.get_autocast_dtype("cpu") == torch.float16 else 1.0, put


@holder
def digits_of_integers() -> Holder:
    return (
        lambda: sys.get_int_max_str_digits() / 5000,
        lambda value: sys.set_int_max_str_digits(int(5000 * (value + 1))),
    )


@holder
def denormal_numbers() -> Holder:
    def put(value: float) -> None:
        torch.set_flush_denormal(value > 1)

    return lambda: 2.0 if (torch.tensor([1e-45]) * 1).item() == 0 else 1.0, put


@holder
def process_group() -> Holder:
    distributed = torch.distributed

    def put(value: float) -> None:
        if value > 1 and not distributed.is_initialized():
            distributed.init_process_group(
                "gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1
            )
        elif value <= 1 and distributed.is_initialized():
            distributed.destroy_process_group()

    return lambda: 2.0 if distributed.is_initialized() else 1.0, put


def sign(value: float) -> float:
    return math.copysign(1.0, value)


@holder
def sign_of_a_zero() -> Holder:
    held = [0.0]
    return (
        lambda: 1.5 + sign(held[0]) / 2,
        lambda value: held.__setitem__(0, -0.0 if value > 1 else 0.0),
    )


@holder
def sign_of_a_zero_in_a_tuple() -> Holder:
    held = {"pair": (0.0, 1)}

    def put(value: float) -> None:
        held["pair"] = (-0.0 if value > 1 else 0.0, 1)

    return lambda: 1.5 + sign(held["pair"][0]) / 2, put


@holder
def sign_of_a_zero_in_a_complex_number() -> Holder:
    held = [complex(1, 0.0)]

    def put(value: float) -> None:
        held[0] = complex(1, -0.0 if value > 1 else 0.0)

    return lambda: 1.5 + sign(held[0].imag) / 2, put


@holder
def sign_of_a_default() -> Holder:
    def read(value: float = 0.0) -> float:
        return 1.5 + sign(value) / 2

    def put(value: float) -> None:
        read.__defaults__ = (-0.0 if value > 1 else 0.0,)

    return lambda: read(), put


KINDS: dict[type, float] = {bool: 0.5, int: 1.0, float: 2.0}


@holder
def kind_of_a_key() -> Holder:
    held: dict[Any, int] = {1: 0}

    def put(value: float) -> None:
        held.clear()
        held[1.0 if value > 1 else 1 if value == 1 else True] = 0

    return lambda: next(KINDS[type(key)] for key in held), put


@holder
def kind_of_a_key_of_two() -> Holder:
    held: dict[Any, int] = {}

    def put(value: float) -> None:
        held.clear()
        held.update({1.0 if value > 1 else 1: 0, "other": 1})

    return lambda: next(KINDS[type(key)] for key, of in held.items() if not of), put


@holder
def kind_of_a_member() -> Holder:
    held: set[Any] = {1}

    def put(value: float) -> None:
        held.clear()
        held.add(1.0 if value > 1 else True)

    return lambda: next(KINDS[type(one)] for one in held), put


@holder
def kind_of_a_member_of_a_frozen_set() -> Holder:
    held = {"set": frozenset({1})}

    def put(value: float) -> None:
        held["set"] = frozenset[Any]({1.0 if value > 1 else True})

    return lambda: next(KINDS[type(one)] for one in held["set"]), put


@holder
def kind_of_an_item_of_a_tuple() -> Holder:
    held: dict[str, tuple[Any, ...]] = {"tuple": (1, 2)}

    def put(value: float) -> None:
        held["tuple"] = (1.0 if value > 1 else True, 2)

    return lambda: KINDS[type(held["tuple"][0])], put


@holder
def kind_of_a_key_that_is_a_tuple() -> Holder:
    held: dict[Any, int] = {}

    def put(value: float) -> None:
        held.clear()
        held[1.0 if value > 1 else True, 2] = 0

    return lambda: next(KINDS[type(key[0])] for key in held), put


@holder
def sign_of_a_key() -> Holder:
    held: dict[float, int] = {}

    def put(value: float) -> None:
        held.clear()
        held[-0.0 if value > 1 else 0.0] = 0

    return lambda: next(1.5 + sign(key) / 2 for key in held), put


@holder
def package_that_is_there() -> Holder:
    folder = Path(tempfile.mkdtemp())
    (folder / "memplan_of_a_test.py").touch()

    def put(value: float) -> None:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        if value > 1:
            sys.path.append(str(folder))

    return lambda: 2.0 if importlib.util.find_spec("memplan_of_a_test") else 1.0, put


@holder
def file_of_a_package() -> Holder:
    folder = Path(tempfile.mkdtemp())
    sys.path.append(str(folder))

    def put(value: float) -> None:
        (folder / "memplan_in_a_file.py").unlink(missing_ok=True)
        if value > 1:
            (folder / "memplan_in_a_file.py").touch()
        importlib.invalidate_caches()

    return lambda: 2.0 if importlib.util.find_spec("memplan_in_a_file") else 1.0, put


@holder
def version_of_a_package() -> Holder:
    folder = Path(tempfile.mkdtemp())
    about = folder / "memplan_versioned-1.dist-info" / "METADATA"
    about.parent.mkdir()
    sys.path.insert(0, str(folder))

    def put(value: float) -> None:
        about.write_text(f"Metadata-Version: 2.1\nName: memplan-versioned\nVersion: {value}\n")

    return lambda: float(importlib.metadata.version("memplan-versioned")), put


@holder
def ordered_dictionary_in_place_of_another() -> Holder:
    held = {"order": collections.OrderedDict(first=1.0, second=2.0)}

    def put(value: float) -> None:
        other = collections.OrderedDict(first=1.0, second=2.0)
        if value > 1:
            other.move_to_end("first")
        held["order"] = other

    return lambda: next(iter(held["order"].values())), put


@holder
def order_of_modules() -> Holder:
    held = nn.ModuleDict({"first": nn.Identity(), "second": nn.Tanh()})

    def put(value: float) -> None:
        names = list(held)
        if (names[0] == "second") is not (value > 1):
            held["moved"] = held.pop(names[0])
            held[names[0]] = held.pop("moved")

    return lambda: 2.0 if next(iter(held)) == "second" else 1.0, put


@holder
def autocast_without_a_context() -> Holder:
    def put(value: float) -> None:
        torch.set_autocast_enabled("cpu", value > 1)

    return lambda: 2.0 if torch.is_autocast_enabled("cpu") else 1.0, put


@holder
def autocast_of_products() -> Holder:
    held = torch.tensor([[1.001]])

    def put(value: float) -> None:
        torch.set_autocast_enabled("cpu", value > 1)

    return lambda: (held @ held).float().sum(), put


@holder
def autocast_s_cache() -> Holder:
    return (
        lambda: 2.0 if torch.is_autocast_cache_enabled() else 1.0,
        lambda value: torch.set_autocast_cache_enabled(value > 1),
    )


@holder
def order_of_a_set() -> Holder:
    held: set[int] = {0, 8}

    def put(value: float) -> None:
        held.clear()
        held.update((8, 0) if value > 1 else (0, 8))

    return lambda: next(1.0 + one / 8 for one in held), put


@holder
def order_of_what_hooks_do() -> Holder:
    """Dynamo goes through these one by one."""
    layer, one = nn.Identity(), torch.ones(())
    layer.register_forward_hook(lambda _layer, _given, result: result + 1)
    layer.register_forward_hook(lambda _layer, _given, result: result * 2)
    first = next(iter(layer._forward_hooks))

    def put(value: float) -> None:
        hooks: Any = layer._forward_hooks
        hooks.move_to_end(first, last=value > 1)

    return lambda: layer(one) / 4, put


@holder
def kind_of_the_keys_of_two() -> Holder:
    held: dict[Any, float] = {}

    def put(value: float) -> None:
        held.clear()
        held.update({(1.0 if value > 1 else True, 0): 0.0, (2, 0): 0.0})

    return lambda: sum(KINDS[type(key[0])] + of for key, of in held.items()), put


@typing.runtime_checkable
class HasFactor(typing.Protocol):
    factor: float


@holder
def attribute_that_a_protocol_asks_for() -> Holder:
    held = types.SimpleNamespace()

    def put(value: float) -> None:
        vars(held).clear()
        vars(held).update({"factor": value} if value > 1 else {})

    return lambda: 2.0 if isinstance(held, HasFactor) else 1.0, put


@holder
def subclasses_by_code() -> Holder:
    answers = [False]

    class Base(abc.ABC):  # noqa: B024
        @classmethod
        def __subclasshook__(cls, _other: type) -> bool:
            return answers[0]

    held = Plain()

    def put(value: float) -> None:
        answers[0] = value > 1
        _abc._reset_caches(Base)

    return lambda: 2.0 if isinstance(held, Base) else 1.0, put


@holder
def global_in_place_of_a_builtin() -> Holder:
    module: Any = types.ModuleType("memplan_test_globals")
    sys.modules[module.__name__] = module
    exec("def factor():\n    return float(max(1.0, 0.5))", vars(module))

    def put(value: float) -> None:
        vars(module).pop("max", None)
        vars(module).update({} if value == 1 else {"max": lambda *_given: value})

    return lambda: module.factor(), put


@holder
def annotation_of_a_function() -> Holder:
    def function() -> None:
        pass

    return (
        lambda: function.__annotations__.get("factor", 1.0),
        lambda value: function.__annotations__.__setitem__("factor", value),
    )


class Key:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.number == other.number

    def __hash__(self) -> int:
        return 1


@holder
def key_that_is_equal() -> Holder:
    key, held = Key(1), {Key(2): 2.0}
    return lambda: held.get(key, 1.0), lambda value: setattr(key, "number", 1 + (value > 1))


@holder
def function_that_is_a_member() -> Holder:
    held = types.SimpleNamespace(function=math.sin)
    return (
        lambda: 2.0 if held.function in {math.cos, math.tan} else 1.0,
        lambda value: setattr(held, "function", math.cos if value > 1 else math.sin),
    )


@holder
def module_in_the_place_of_an_imported_one() -> Holder:
    name = "memplan_test_module"

    def put(value: float) -> None:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name])["factor"] = value

    def factor() -> float:
        import memplan_test_module  # type: ignore[import-not-found]

        found: float = memplan_test_module.factor
        return found

    put(1.0)
    return factor, put
