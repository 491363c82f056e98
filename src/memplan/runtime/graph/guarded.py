"""What PyTorch's guards leave out.

Dynamo guards what it read while it traced a function. It leaves out what it expects nobody to
change, for speed, and what its authors did not think of. Here its guards are made as strict as they
can be (`strict`), captures that they cannot hold are refused (`refusal`, `Guarded.see`), and what
they never look at is compared before each call (`Guarded.changed`).
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import enum
import functools
import operator
import random
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._dynamo.tensor_version_op import _tensor_version
from torch._dynamo.types import GuardFilterEntry
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable
from torch.nn.modules import module as _modules
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

from memplan.capturing.patches import attributes as patching
from memplan.runtime.graph import watch
from memplan.runtime.graph.compile import GUARDED_SINCE

_STRICT = {
    "torch._dynamo.config.allow_rnn": True,
    "torch._dynamo.config.assume_dunder_attributes_remain_unchanged": False,
    "torch._dynamo.config.guard_nn_modules": True,
    "torch._dynamo.config.guard_nn_modules_using_dict_tags": False,
    "torch._dynamo.config.skip_fsdp_guards": False,
    "torch._dynamo.config.skip_nnmodule_hook_guards": False,
    "torch._dynamo.config.skip_no_tensor_aliasing_guards_on_parameters": False,
    "torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags": False,
    # NumPy's functions as PyTorch's, whose results are not the same bits.
    "torch._dynamo.config.trace_numpy": False,
}
_SETTINGS = {name.rpartition(".")[2]: value for name, value in _STRICT.items()}
_OWN_LAYOUT = (dict, OrderedDict, defaultdict)


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Have Dynamo guard also what it expects nobody to change: hooks, defaults of functions,
    aliases among parameters, what the standard library keeps in its modules, and more
    (`stricter`)."""
    from memplan.runtime.graph.stricter import PATCHES  # releases before 2.13 do not have it

    patches = [
        (LoggingLoggerVariable, "call_method", _call_of_a_logger),
        *PATCHES,
        *watch.PATCHES,
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(_SETTINGS))
        for owner, name, instead in patches:
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


_call_method: Callable[..., Any] = LoggingLoggerVariable.call_method


def _call_of_a_logger(self: Any, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """What only the first call does is done while it is traced, and is no reason to refuse:
    Transformers has `warning_once`."""
    method: Any = getattr(getattr(self.value, name, None), "__func__", None)
    known = all(one.is_python_constant() for one in (*args, *kwargs.values()))
    if known and _is_memoized(method):
        values = {key: one.as_python_constant() for key, one in kwargs.items()}
        given = [one.as_python_constant() for one in args]
        with watch.WATCH.paused():
            said = method(self.value, *given, **values)
        if said is None:
            return ConstantVariable.create(None)
    return _call_method(self, tx, name, args, kwargs)


def _is_memoized(function: Any) -> bool:
    """Whether it never runs twice for the same arguments."""
    return isinstance(function, _LRU_CACHE) and function.cache_parameters()["maxsize"] is None


_LRU_CACHE: Any = type(functools.cache(id))


def refusal(module: torch.fx.GraphModule) -> str:
    """Why a captured graph does not compute what Python would; empty where it does."""
    for node in module.graph.nodes:
        given = node.meta.get("grapharg")
        if node.op == "placeholder" and given is not None and given.pass_arg_as_tensor:
            return f"a number of Python or NumPy that PyTorch captures as a tensor: {node.name}"
    for node in module.graph.nodes:
        for _, kind in (node.meta.get("nn_module_stack") or {}).values():
            if isinstance(kind, type) and issubclass(kind, DistributedDataParallel):
                return "DistributedDataParallel, whose hooks a graph does not run"
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if node.target in (torch.bernoulli, "bernoulli"):
                return "torch.bernoulli, which PyTorch captures as Tensor.bernoulli_"
            if node.target is _tensor_version:
                return "a tensor's `_version`, which PyTorch captures as a number"
    return ""


def unguarded() -> str:
    """Why guards of the installed PyTorch are not enough for any capture; empty where they are."""
    if TorchVersion(torch.__version__) >= GUARDED_SINCE:
        return ""
    return (
        f"guards of PyTorch {torch.__version__} leave out attributes of classes and defaults of "
        "functions; those of 2.13 do not"
    )


def casts_stay() -> bool:
    """Whether autocast keeps the weights that it has cast, for ever: it is on outside of its
    context. What PyTorch goes on with are then the weights of the first step."""
    if not (torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()):
        return False
    torch.autocast_increment_nesting()
    return not torch.autocast_decrement_nesting()


def saving_is_hooked() -> bool:
    """Whether what forward saves passes through hooks around the call
    (`torch.autograd.graph.saved_tensors_hooks`), which a graph would not call."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _unseen(value: Any) -> str:
    """Whether a value that PyTorch captured once may give another one next, unseen by guards."""
    if isinstance(value, types.GeneratorType):
        return f"a generator: {value.__qualname__}"
    if isinstance(value, type) and _decides_by_itself(value):
        return f"a class that decides by code what its instances are: {value.__qualname__}"
    if isinstance(value, np.ndarray):
        return "a NumPy array, of which guards compare nothing"
    if value is random and TorchVersion(torch.__version__) >= "2.14":
        return "Python's random module"
    return ""


def _decides_by_itself(kind: type) -> bool:
    """Whether `issubclass` asks code, of whose answers it keeps some, or looks at what an object
    has (`typing.runtime_checkable`)."""
    code = getattr(getattr(kind, "__subclasshook__", None), "__code__", None)
    asks = code is not None and watch.of_user(code.co_filename)
    return asks or bool(vars(kind).get("_is_runtime_protocol"))


class Guarded:
    """What captures depend on and no guard compares: methods of classes, metaclasses, what is
    registered with abstract classes, names among the builtins, limits of the interpreter."""

    def __init__(self) -> None:
        self.refusal = ""
        """Why a capture cannot be guarded."""
        self._classes: dict[type, list[Any]] = {}
        self._members: dict[type[enum.Enum], tuple[dict[Any, Any], ...]] = {}
        """Of enumerations, by name and by value: a capture has what it was given."""
        self._asked: list[tuple[Callable[[], Any], Any]] = []
        """What PyTorch asked the system, and the answers."""
        self._names = _builtins()
        self._limits = _limits()

    def see(self, entries: Sequence[GuardFilterEntry]) -> list[bool]:
        """All guards of a capture; PyTorch calls it and drops those that it answers False for."""
        from memplan.runtime.graph.stricter import take_asked  # releases before 2.13 do not have it

        self._asked += take_asked()
        for entry in entries:
            if entry.has_value:
                for value in _within(entry.value):
                    self._see(value)
                    self.refusal = self.refusal or _unseen(value)
                if _is_mapping_of_its_own(entry.value) and _looked_into(
                    entry.name, entry.value, entries
                ):
                    kind = type(entry.value).__name__
                    self.refusal = f"attributes of a {kind}, a kind of dict, which are not guarded"
        return [True] * len(entries)

    def changed(self) -> bool:
        """Whether any of it is not as it was when it was seen."""
        with patching.as_compilers_see():
            return self._changed()

    def _changed(self) -> bool:
        if _limits() != self._limits or not _same(_builtins(), self._names):
            return True
        if any(answered(ask) != answer for ask, answer in self._asked):
            return True
        for one, known in self._members.items():
            # Flags have more as soon as they are asked for.
            if not all(map(operator.le, map(dict.items, known), map(dict.items, _members(one)))):
                return True
        for kind, seen in self._classes.items():
            now = list(vars(kind).values())
            if not _same(now, seen):
                if not _same(_behaviour(kind, now), _behaviour(kind, seen)):
                    return True
                self._classes[kind] = now  # only data, which is guarded where it is read
        return False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Around what runs after the capture, where nothing of the loss function does: it imports
        modules, which register classes with abstract ones."""
        before = _limits()
        yield
        if self._limits == before:
            self._limits = _limits()

    def _see(self, value: Any) -> None:
        of_class = type.mro(value) if isinstance(value, type) and value is not type else []
        for kind in (*of_class, *type(value).__mro__):
            if kind not in self._classes and kind.__flags__ & _HEAP_TYPE:
                self._classes[kind] = list(vars(kind).values())
                if issubclass(kind, enum.Enum):
                    self._members[kind] = tuple(dict(of) for of in _members(kind))


def answered(ask: Callable[[], Any]) -> Any:
    """A constant, with what `==` does not tell apart."""
    try:
        found = ask()
    except Exception as error:
        return type(error)
    return type(found), repr(found) if isinstance(found, float) else found


def _members(kind: type[enum.Enum]) -> tuple[dict[Any, Any], ...]:
    return kind._member_map_, kind._value2member_map_


_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: other classes cannot be changed."""


def _builtins() -> list[Any]:
    return [*vars(builtins), *vars(builtins).values()]


def _limits() -> tuple[object, ...]:
    """What functions answer that PyTorch's compiler takes for constants."""
    distributed = torch.distributed
    return (
        abc.get_cache_token(),
        sys.getrecursionlimit(),
        sys.get_int_max_str_digits(),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        distributed.is_available() and distributed.is_initialized(),
        sys.float_info.min / _TWO == 0,  # torch.set_flush_denormal
        *(ask() for ask in _CHOOSE_KERNELS),
        *(tuple(vars(_modules)[name].values()) for name in _HOOKS),
    )


_CHOOSE_KERNELS: tuple[Callable[[], object], ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    lambda: torch.backends.mkldnn.enabled,
    lambda: torch.backends.cudnn.enabled,
)
"""Settings that are asked while a graph is traced, of attention and recurrent cells."""
_TWO = 2.0
_HOOKS = [name for name, kept in vars(_modules).items() if type(kept) is OrderedDict]
"""Of all modules, as `register_module_forward_hook` keeps them."""


def _same(these: list[Any], those: list[Any]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _behaviour(kind: type, values: list[Any]) -> list[Any]:
    """What is not data: functions and other descriptors; all of a metaclass."""
    if issubclass(kind, type):
        return values
    return [value for value in values if hasattr(type(value), "__get__")]


def _within(value: Any) -> Iterator[Any]:
    """A value; for a function also what it closes over and the globals that it names."""
    yield value
    function = value.__func__ if isinstance(value, types.MethodType) else value
    if isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty
                yield cell.cell_contents
        for name in function.__code__.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]


def _is_mapping_of_its_own(value: Any) -> bool:
    return isinstance(value, dict) and type(value) not in _OWN_LAYOUT


def _looked_into(name: str, value: Any, entries: Sequence[GuardFilterEntry]) -> bool:
    """Whether guards are on what an object has beside its items. That its methods call `super` is
    none of it: their closure holds the class."""
    return any(
        other.name.startswith((f"{name}.", f"type({name})")) or f"(type({name})" in other.name
        for other in entries
        if not (other.name.endswith(".cell_contents") and other.has_value)
        or not any(other.value is kind for kind in type(value).__mro__)
    )
