"""Ways of holding a number that changes between two calls of a step."""

from __future__ import annotations

import array
import collections
import configparser
import contextvars
import ctypes
import decimal
import enum
import fractions
import functools
import io
import itertools
import json
import locale
import logging
import multiprocessing
import os
import queue
import random
import re
import struct
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

Holder = tuple[Callable[[], Any], Callable[[float], object]]
"""A function that a loss is multiplied by, and one that sets what it gives: 1.0, 2.0 or 0.5."""
HOLDERS: dict[str, Callable[[], Holder]] = {}
FACTOR = 1.0
"""What `module global` changes."""
OTHER = types.ModuleType("other_module")


def holder(make: Callable[[], Holder]) -> Callable[[], Holder]:
    HOLDERS[make.__name__.replace("_", " ").strip()] = make
    return make


def temporary() -> Path:
    return Path(tempfile.mkdtemp()) / "file"


@holder
def list_() -> Holder:
    held = [1.0]
    return lambda: held[0], lambda value: held.__setitem__(0, value)


@holder
def dict_() -> Holder:
    held = {"a": 1.0}
    return lambda: held["a"], lambda value: held.__setitem__("a", value)


@holder
def class_attribute() -> Holder:
    class Held:
        factor = 1.0

    return lambda: Held.factor, lambda value: setattr(Held, "factor", value)


@holder
def metaclass_attribute() -> Holder:
    class Meta(type):
        factor = 1.0

    class Held(metaclass=Meta):
        pass

    return lambda: Held.factor, lambda value: setattr(Meta, "factor", value)


@holder
def environment() -> Holder:
    os.environ["MEMPLAN_TEST_FACTOR"] = "1.0"
    return (
        lambda: float(os.environ["MEMPLAN_TEST_FACTOR"]),
        lambda value: os.environ.__setitem__("MEMPLAN_TEST_FACTOR", str(value)),
    )


@holder
def getenv() -> Holder:
    os.environ["MEMPLAN_TEST_FACTOR"] = "1.0"
    return (
        lambda: float(os.getenv("MEMPLAN_TEST_FACTOR", "1")),
        lambda value: os.environ.__setitem__("MEMPLAN_TEST_FACTOR", str(value)),
    )


@holder
def small_numpy_array() -> Holder:
    held = np.ones(2)
    return lambda: float(held[0]), lambda value: held.__setitem__(0, value)


@holder
def numpy_array_of_2_MiB() -> Holder:  # noqa: N802
    held = np.ones(1 << 18)
    return lambda: float(held[-1]), lambda value: held.__setitem__(-1, value)


@holder
def numpy_array_times_loss() -> Holder:
    held = np.ones(1 << 18)
    return lambda: torch.from_numpy(held)[-1].float(), lambda value: held.__setitem__(-1, value)


@holder
def numpy_scalar() -> Holder:
    held = types.SimpleNamespace(factor=np.float64(1))
    return lambda: float(held.factor), lambda value: setattr(held, "factor", np.float64(value))


@holder
def multiprocessing_value() -> Holder:
    held = multiprocessing.Value("d", 1.0)
    return lambda: held.value, lambda value: setattr(held, "value", value)


@holder
def multiprocessing_raw_value() -> Holder:
    held = multiprocessing.RawValue("d", 1.0)
    return lambda: held.value, lambda value: setattr(held, "value", value)


@holder
def threading_event() -> Holder:
    held = threading.Event()
    return (
        lambda: 2.0 if held.is_set() else 1.0,
        lambda value: held.set() if value == 2.0 else held.clear(),
    )


@holder
def logger_level() -> Holder:
    held = logging.getLogger("memplan.test.factor")
    return (
        lambda: 2.0 if held.isEnabledFor(logging.DEBUG) else 1.0,
        lambda value: held.setLevel(logging.DEBUG if value == 2.0 else logging.ERROR),
    )


@holder
def logger_level_number() -> Holder:
    held = logging.getLogger("memplan.test.factor")
    return lambda: held.level / 10.0, lambda value: held.setLevel(int(value * 10))


@holder
def path_exists() -> Holder:
    path = temporary()
    return (
        lambda: 2.0 if os.path.exists(path) else 1.0,  # noqa: PTH110
        lambda value: path.touch() if value == 2.0 else path.unlink(missing_ok=True),
    )


@holder
def pathlib_exists() -> Holder:
    path = temporary()
    return (
        lambda: 2.0 if path.exists() else 1.0,
        lambda value: path.touch() if value == 2.0 else path.unlink(missing_ok=True),
    )


@holder
def file_content() -> Holder:
    path = temporary()
    path.write_text("1.0")

    def read() -> float:
        with open(path) as file:  # noqa: PTH123
            return float(file.read())

    return read, lambda value: path.write_text(str(value))


@holder
def json_file() -> Holder:
    path = temporary()
    path.write_text("1.0")
    return lambda: json.loads(path.read_text()), lambda value: path.write_text(json.dumps(value))


@holder
def closure() -> Holder:
    held = 1.0

    def put(value: float) -> None:
        nonlocal held
        held = value

    return lambda: held, put


@holder
def nonlocal_counter() -> Holder:
    count = 0

    def read() -> float:
        nonlocal count
        count += 1
        return float(count)

    return read, lambda value: None


@holder
def default_argument() -> Holder:
    def read(factor: float = 1.0) -> float:
        return factor

    return read, lambda value: setattr(read, "__defaults__", (value,))


@holder
def keyword_default() -> Holder:
    def read(*, factor: float = 1.0) -> float:
        return factor

    return read, lambda value: setattr(read, "__kwdefaults__", {"factor": value})


@holder
def function_attribute() -> Holder:
    def read() -> float:
        return read.factor  # type: ignore[attr-defined]

    read.factor = 1.0  # type: ignore[attr-defined]
    return read, lambda value: setattr(read, "factor", value)


@holder
def changed_code() -> Holder:
    def read() -> float:
        return 1.0

    def two() -> float:
        return 2.0

    def half() -> float:
        return 0.5

    one = types.FunctionType(read.__code__, globals())
    codes = {1.0: one.__code__, 2.0: two.__code__, 0.5: half.__code__}
    return read, lambda value: setattr(read, "__code__", codes[value])


@holder
def partial() -> Holder:
    held = [functools.partial(float, 1.0)]
    return (
        lambda: held[0](),
        lambda value: held.__setitem__(0, functools.partial(float, value)),
    )


@holder
def partial_of_a_list() -> Holder:
    held = [1.0]
    read = functools.partial(held.__getitem__, 0)
    return read, lambda value: held.__setitem__(0, value)


@holder
def partial_changed() -> Holder:
    read = functools.partial(max, 0.1, 1.0)
    setter: Any = getattr(read, "__setstate__")  # noqa: B009
    return read, lambda value: setter((max, (0.1, value), {}, {}))


@holder
def generator() -> Holder:
    def numbers() -> Iterator[float]:
        for number in itertools.count(1):
            yield float(number)

    held = numbers()
    return lambda: next(held), lambda value: None


@holder
def generator_over_a_list() -> Holder:
    held = [1.0]

    def numbers() -> Iterator[float]:
        while True:
            yield held[0]

    made = numbers()
    return lambda: next(made), lambda value: held.__setitem__(0, value)


@holder
def property_() -> Holder:
    state = [1.0]

    class Held:
        @property
        def factor(self) -> float:
            return state[0]

    held = Held()
    return lambda: held.factor, lambda value: state.__setitem__(0, value)


@holder
def descriptor() -> Holder:
    class Field:
        value = 1.0

        def __get__(self, instance: Any, owner: Any) -> float:
            return self.value

        def __set__(self, instance: Any, value: float) -> None:
            self.value = value

    class Held:
        factor = Field()

    held = Held()
    return lambda: held.factor, lambda value: setattr(held, "factor", value)


@holder
def cached_property() -> Holder:
    class Held:
        @functools.cached_property
        def factor(self) -> float:
            return 1.0

    held = Held()
    return lambda: held.factor, lambda value: held.__dict__.__setitem__("factor", value)


@holder
def lru_cache() -> Holder:
    state = [1.0]

    @functools.lru_cache(1)
    def read() -> float:
        return state[0]

    def put(value: float) -> None:
        state[0] = value
        read.cache_clear()

    return lambda: read(), put


@holder
def context_variable() -> Holder:
    held = contextvars.ContextVar("held", default=1.0)
    return lambda: held.get(), held.set


@holder
def weak_reference() -> Holder:
    class Held:
        factor = 1.0

    held = Held()
    ref = weakref.ref(held)

    def put(value: float) -> None:
        held.factor = value

    return lambda: ref().factor, put  # type: ignore[union-attr]


@holder
def weak_reference_that_dies() -> Holder:
    class Held:
        pass

    alive = [Held()]
    ref = weakref.ref(alive[0])

    def put(value: float) -> None:
        if value == 2.0:
            alive.clear()

    return lambda: 1.0 if ref() is not None else 2.0, put


@holder
def weak_key_dictionary() -> Holder:
    class Key:
        pass

    key = Key()
    held = weakref.WeakKeyDictionary({key: 1.0})
    return lambda: held[key], lambda value: held.__setitem__(key, value)


@holder
def ctypes_double() -> Holder:
    held = ctypes.c_double(1.0)
    return lambda: held.value, lambda value: setattr(held, "value", value)


@holder
def ctypes_structure() -> Holder:
    class Held(ctypes.Structure):
        _fields_ = [("factor", ctypes.c_double)]

    held = Held(1.0)
    return lambda: held.factor, lambda value: setattr(held, "factor", value)


@holder
def array_array() -> Holder:
    held = array.array("d", [1.0])
    return lambda: held[0], lambda value: held.__setitem__(0, value)


@holder
def deque() -> Holder:
    held = collections.deque([1.0])
    return lambda: held[0], lambda value: held.__setitem__(0, value)


@holder
def deque_rotated() -> Holder:
    held = collections.deque([1.0, 2.0, 3.0])

    def read() -> float:
        held.rotate(1)
        return held[0]

    return read, lambda value: None


@holder
def defaultdict() -> Holder:
    held: Any = collections.defaultdict(lambda: 1.0)
    return lambda: held["a"], lambda value: held.__setitem__("a", value)


@holder
def counter() -> Holder:
    held = collections.Counter(a=2)
    return lambda: held["a"] / 2, lambda value: held.__setitem__("a", int(value * 2))


@holder
def chain_map() -> Holder:
    first = {"a": 1.0}
    held = collections.ChainMap({}, first)
    return lambda: held["a"], lambda value: first.__setitem__("a", value)


@holder
def set_() -> Holder:
    held: set[str] = set()
    return (
        lambda: 2.0 if "a" in held else 1.0,
        lambda value: held.add("a") if value == 2.0 else held.discard("a"),
    )


@holder
def enum_member() -> Holder:
    class Held(enum.Enum):
        A = 1

    Held.A.factor = 1.0  # type: ignore[attr-defined]
    return (
        lambda: Held.A.factor,  # type: ignore[attr-defined]
        lambda value: setattr(Held.A, "factor", value),
    )


@holder
def data_class() -> Holder:
    @dataclass
    class Held:
        factor: float = 1.0

    held = Held()
    return lambda: held.factor, lambda value: setattr(held, "factor", value)


@holder
def frozen_data_class() -> Holder:
    @dataclass(frozen=True)
    class Held:
        factor: float = 1.0

    held = Held()
    return lambda: held.factor, lambda value: object.__setattr__(held, "factor", value)


@holder
def simple_namespace() -> Holder:
    held = types.SimpleNamespace(factor=1.0)
    return lambda: held.factor, lambda value: setattr(held, "factor", value)


@holder
def module_global() -> Holder:
    globals()["FACTOR"] = 1.0
    return lambda: FACTOR, lambda value: globals().__setitem__("FACTOR", value)


@holder
def other_module() -> Holder:
    OTHER.factor = 1.0  # type: ignore[attr-defined]
    return (
        lambda: OTHER.factor,
        lambda value: setattr(OTHER, "factor", value),
    )


@holder
def imported_module() -> Holder:
    sys.modules["memplan_test_other"] = OTHER
    OTHER.factor = 1.0  # type: ignore[attr-defined]

    def read() -> float:
        import memplan_test_other  # type: ignore[import-not-found]

        return memplan_test_other.factor

    return read, lambda value: setattr(OTHER, "factor", value)


@holder
def builtin() -> Holder:
    import builtins

    builtins.memplan_test_factor = 1.0  # type: ignore[attr-defined]
    return (
        lambda: memplan_test_factor,  # type: ignore[name-defined]  # noqa: F821
        lambda value: setattr(builtins, "memplan_test_factor", value),
    )


@holder
def clock() -> Holder:
    now = [1.0]
    time.memplan_test = lambda: now[0]  # type: ignore[attr-defined]
    return (
        lambda: time.time() * 0 + time.memplan_test(),  # type: ignore[attr-defined]
        lambda value: now.__setitem__(0, value),
    )


@holder
def random_module() -> Holder:
    random.seed(3)
    return lambda: random.random(), lambda value: None


@holder
def random_object() -> Holder:
    held = random.Random(3)
    return lambda: held.random(), lambda value: None


@holder
def random_seeded_between() -> Holder:
    random.seed(3)
    return lambda: random.uniform(0.5, 2.0), lambda value: random.seed(int(value * 2))


@holder
def random_choice() -> Holder:
    random.seed(3)
    return lambda: random.choice([1.0, 2.0, 3.0]), lambda value: None


@holder
def random_shuffle() -> Holder:
    random.seed(3)

    def read() -> float:
        numbers = [1.0, 2.0, 3.0, 4.0]
        random.shuffle(numbers)
        return numbers[0]

    return read, lambda value: None


@holder
def numpy_random() -> Holder:
    np.random.seed(3)
    return lambda: float(np.random.rand()), lambda value: None


@holder
def numpy_generator() -> Holder:
    held = np.random.default_rng(3)
    return lambda: float(held.random()), lambda value: None


@holder
def tensor_item() -> Holder:
    held = torch.ones(1)
    return lambda: held.item(), lambda value: held.fill_(value)


@holder
def tensor_in_a_list() -> Holder:
    held = [torch.ones(())]
    return lambda: held[0], lambda value: held.__setitem__(0, torch.tensor(value))


@holder
def tensor_filled() -> Holder:
    held = [torch.ones(())]
    return lambda: held[0], lambda value: held[0].fill_(value)


@holder
def tensor_storage_pointer() -> Holder:
    held: list[Any] = [torch.ones(())]
    return lambda: float(held[0].tolist()), lambda value: held[0].fill_(value)


@holder
def getattr_object() -> Holder:
    state = {"factor": 1.0}

    class Held:
        def __getattr__(self, name: str) -> float:
            return state[name]

    held = Held()
    return lambda: held.factor, lambda value: state.__setitem__("factor", value)


@holder
def slots() -> Holder:
    class Held:
        __slots__ = ("factor",)

    held: Any = Held()
    held.factor = 1.0
    return lambda: held.factor, lambda value: setattr(held, "factor", value)


@holder
def mapping_proxy() -> Holder:
    state = {"factor": 1.0}
    held = types.MappingProxyType(state)
    return lambda: held["factor"], lambda value: state.__setitem__("factor", value)


@holder
def config_parser() -> Holder:
    held = configparser.ConfigParser()
    held.read_dict({"a": {"factor": "1.0"}})
    return lambda: held.getfloat("a", "factor"), lambda value: held.set("a", "factor", str(value))


@holder
def decimal_() -> Holder:
    held = [decimal.Decimal("1.0")]
    return (
        lambda: float(held[0]),
        lambda value: held.__setitem__(0, decimal.Decimal(value)),
    )


@holder
def decimal_context() -> Holder:
    context = decimal.getcontext()
    return (
        lambda: decimal.getcontext().prec / 10,
        lambda value: setattr(context, "prec", int(value * 10)),
    )


@holder
def fraction() -> Holder:
    held = [fractions.Fraction(1)]
    return (
        lambda: float(held[0]),
        lambda value: held.__setitem__(0, fractions.Fraction(value)),
    )


@holder
def itertools_count() -> Holder:
    held = itertools.count(1)
    return lambda: next(held), lambda value: None


@holder
def itertools_cycle() -> Holder:
    held = itertools.cycle([1.0, 2.0, 3.0])
    return lambda: next(held), lambda value: None


@holder
def itertools_chain() -> Holder:
    held = itertools.chain([1.0, 2.0, 3.0], itertools.repeat(0.5))
    return lambda: next(held), lambda value: None


@holder
def list_iterator() -> Holder:
    held = iter([float(number) for number in range(1, 50)])
    return lambda: next(held), lambda value: None


@holder
def map_iterator() -> Holder:
    held = map(float, range(1, 50))
    return lambda: next(held), lambda value: None


@holder
def zip_iterator() -> Holder:
    held = zip(range(1, 50), range(1, 50), strict=True)
    return lambda: next(held)[0], lambda value: None


@holder
def enumerate_iterator() -> Holder:
    held = enumerate(range(50), 1)
    return lambda: next(held)[0], lambda value: None


@holder
def dict_iterator() -> Holder:
    held = iter(dict.fromkeys(range(1, 50)))
    return lambda: next(held), lambda value: None


@holder
def range_iterator() -> Holder:
    held = iter(range(1, 50))
    return lambda: next(held), lambda value: None


@holder
def tuple_iterator() -> Holder:
    held = iter(tuple(range(1, 50)))
    return lambda: next(held), lambda value: None


@holder
def callable_iterator() -> Holder:
    state = [1.0]
    held = iter(lambda: state[0], None)
    return lambda: next(held), lambda value: state.__setitem__(0, value)


@holder
def regex_iterator() -> Holder:
    held = re.finditer(r"\d+", "1 2 3 4 5 6 7 8 9 10 11 12 13 14")
    return lambda: float(next(held).group()), lambda value: None


@holder
def string_io() -> Holder:
    held = io.StringIO("1.0")

    def read() -> float:
        held.seek(0)
        return float(held.read())

    def put(value: float) -> None:
        held.seek(0)
        held.write(str(value))

    return read, put


@holder
def string_io_lines() -> Holder:
    held = io.StringIO("\n".join(str(number) for number in range(1, 50)))
    return lambda: float(held.readline()), lambda value: None


@holder
def bytearray_() -> Holder:
    held = bytearray(struct.pack("d", 1.0))
    return (
        lambda: struct.unpack("d", held)[0],
        lambda value: struct.pack_into("d", held, 0, value),
    )


@holder
def bytearray_element() -> Holder:
    held = bytearray([2])
    return lambda: held[0] / 2, lambda value: held.__setitem__(0, int(value * 2))


@holder
def memory_view() -> Holder:
    raw = bytearray(struct.pack("d", 1.0))
    held = memoryview(raw).cast("d")
    return lambda: held[0], lambda value: held.__setitem__(0, value)


@holder
def recursion_limit() -> Holder:
    """As a flag of the interpreter."""
    base = sys.getrecursionlimit()
    return (
        lambda: float(sys.getrecursionlimit() - base + 1),
        lambda value: sys.setrecursionlimit(base + int(value)),
    )


@holder
def switch_interval() -> Holder:
    return lambda: sys.getswitchinterval() * 100, lambda value: sys.setswitchinterval(value / 100)


@holder
def sys_attribute() -> Holder:
    sys.memplan_test_factor = 1.0  # type: ignore[attr-defined]
    return (
        lambda: sys.memplan_test_factor,  # type: ignore[attr-defined]
        lambda value: setattr(sys, "memplan_test_factor", value),
    )


@holder
def sys_modules() -> Holder:
    def put(value: float) -> None:
        sys.modules.pop("memplan_test_absent", None)
        if value == 2.0:
            sys.modules["memplan_test_absent"] = OTHER

    return lambda: 2.0 if "memplan_test_absent" in sys.modules else 1.0, put


@holder
def locale_() -> Holder:
    def put(value: float) -> None:
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8" if value == 2.0 else "C")

    return lambda: 2.0 if "UTF" in locale.setlocale(locale.LC_CTYPE) else 1.0, put


@holder
def warning_filters() -> Holder:
    def put(value: float) -> None:
        warnings.resetwarnings()
        if value == 2.0:
            warnings.simplefilter("ignore", DeprecationWarning)

    return lambda: 1.0 + len(warnings.filters), put


@holder
def thread_local() -> Holder:
    held = threading.local()
    held.factor = 1.0
    return lambda: held.factor, lambda value: setattr(held, "factor", value)


@holder
def queue_() -> Holder:
    held: queue.Queue[float] = queue.Queue()
    for number in range(1, 50):
        held.put(float(number))
    return lambda: held.get_nowait(), lambda value: None


@holder
def queue_size() -> Holder:
    held: queue.SimpleQueue[float] = queue.SimpleQueue()
    held.put(1.0)
    return lambda: float(held.qsize()), held.put


@holder
def lock() -> Holder:
    held = threading.Lock()

    def put(value: float) -> None:
        if held.locked():
            held.release()
        if value == 2.0:
            held.acquire()

    return lambda: 2.0 if held.locked() else 1.0, put


@holder
def thread_count() -> Holder:
    return lambda: float(torch.get_num_threads()), lambda value: torch.set_num_threads(
        2 if value == 2.0 else 1
    )


@holder
def torch_flag() -> Holder:
    return (
        lambda: 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0,
        lambda value: torch.use_deterministic_algorithms(value == 2.0),
    )


@holder
def default_dtype() -> Holder:
    return (
        lambda: 2.0 if torch.get_default_dtype() is torch.float64 else 1.0,
        lambda value: torch.set_default_dtype(torch.float64 if value == 2.0 else torch.float32),
    )


@holder
def backends_flag() -> Holder:
    return (
        lambda: 2.0 if torch.backends.cudnn.benchmark else 1.0,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value == 2.0),
    )


@holder
def decoder_object() -> Holder:
    """An object of a C extension."""
    held = json.JSONDecoder()
    encoder = json.JSONEncoder()

    def put(value: float) -> None:
        held.parse_float = lambda text: float(text) * value
        held.scan_once = json.scanner.make_scanner(held)  # type: ignore[attr-defined]

    return lambda: held.decode(encoder.encode(1.0)), put


@holder
def hasattr_() -> Holder:
    held = types.SimpleNamespace()

    def put(value: float) -> None:
        if value == 2.0:
            held.there = True
        elif hasattr(held, "there"):
            del held.there

    return lambda: 2.0 if hasattr(held, "there") else 1.0, put


@holder
def isinstance_() -> Holder:
    class One:
        pass

    class Two(One):
        pass

    held = One()
    return (
        lambda: 2.0 if isinstance(held, Two) else 1.0,
        lambda value: setattr(held, "__class__", Two if value == 2.0 else One),
    )


@holder
def bases_() -> Holder:
    class A:
        factor = 1.0

    class B:
        factor = 2.0

    class Held(A):
        pass

    return lambda: Held.factor, lambda value: setattr(
        Held, "__bases__", (B if value == 2.0 else A,)
    )


@holder
def abstract_registration() -> Holder:
    import abc

    class Kind(abc.ABC):  # noqa: B024
        pass

    class Held:
        pass

    held = Held()
    return (
        lambda: 2.0 if isinstance(held, Kind) else 1.0,
        lambda value: Kind.register(Held) if value == 2.0 else None,
    )


@holder
def patched_function() -> Holder:
    held = types.ModuleType("held")
    held.read = lambda: 1.0  # type: ignore[attr-defined]
    made = {1.0: held.read, 2.0: lambda: 2.0, 0.5: lambda: 0.5}
    return (
        lambda: held.read(),
        lambda value: setattr(held, "read", made[value]),
    )


@holder
def patched_method() -> Holder:
    class Held:
        def read(self) -> float:
            return 1.0

    held = Held()
    made = {1.0: Held.read, 2.0: lambda self: 2.0, 0.5: lambda self: 0.5}
    return lambda: held.read(), lambda value: setattr(Held, "read", made[value])


@holder
def registry_dispatch() -> Holder:
    @functools.singledispatch
    def read(what: Any) -> float:
        return 1.0

    def put(value: float) -> None:
        read.register(int, lambda what: value)

    return lambda: read(3), put


@holder
def hash_of_an_object() -> Holder:
    class Held:
        value = 1

        def __hash__(self) -> int:
            return self.value

    held = Held()
    return lambda: float(hash(held)), lambda value: setattr(held, "value", int(value * 2))


@holder
def operators_of_an_object() -> Holder:
    class Held:
        value = 1.0

        def __float__(self) -> float:
            return self.value

    held = Held()
    return lambda: float(held), lambda value: setattr(held, "value", value)


@holder
def length_of_an_object() -> Holder:
    class Held:
        items = [1]  # noqa: RUF012

        def __len__(self) -> int:
            return len(self.items)

    held = Held()
    held.items = [1]
    return lambda: float(len(held)), lambda value: held.items.append(1)


@holder
def user_list() -> Holder:
    held = collections.UserList([1.0])
    return lambda: held[0], lambda value: held.__setitem__(0, value)


@holder
def list_subclass() -> Holder:
    class Held(list):  # type: ignore[type-arg]
        pass

    held = Held([1.0])
    return lambda: held[0], lambda value: held.__setitem__(0, value)


@holder
def dict_subclass_missing() -> Holder:
    state = [1.0]

    class Held(dict):  # type: ignore[type-arg]
        def __missing__(self, key: str) -> float:
            return state[0]

    held = Held()
    return lambda: held["a"], lambda value: state.__setitem__(0, value)


@holder
def named_tuple_in_a_list() -> Holder:
    Held = collections.namedtuple("Held", "factor")
    held = [Held(1.0)]
    return lambda: held[0].factor, lambda value: held.__setitem__(0, Held(value))


@holder
def frame_locals() -> Holder:
    def caller() -> float:
        return float(sys._getframe(0).f_code.co_firstlineno * 0 + 1)

    return caller, lambda value: None


@holder
def working_directory() -> Holder:
    folders = {1.0: tempfile.mkdtemp(), 2.0: tempfile.mkdtemp(), 0.5: tempfile.mkdtemp()}
    numbers = {os.path.realpath(folder): value for value, folder in folders.items()}
    os.chdir(folders[1.0])
    return lambda: numbers[os.getcwd()], lambda value: os.chdir(folders[value])  # noqa: PTH109


@holder
def python_coroutine() -> Holder:
    def numbers() -> Any:
        value = 1.0
        while True:
            value += yield value

    held = numbers()
    next(held)
    return lambda: held.send(1.0), lambda value: None


@holder
def buffer_of_numpy_record() -> Holder:
    held = np.zeros(1, dtype=[("factor", "f8")])
    held["factor"] = 1.0
    return lambda: float(held["factor"][0]), lambda value: held["factor"].__setitem__(0, value)
