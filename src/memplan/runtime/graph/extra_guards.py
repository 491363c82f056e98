"""Guards beside PyTorch's own.

Dynamo guards what it reads while it traces a function, so that a change makes it trace again. For
speed it leaves out what it expects nobody to change, and some cases are simply not covered. Here
its guards are made as strict as possible (`strict`), captures that cannot be guarded are refused
(`refusal`, `ExtraGuards.record`), and what no guard reads is compared before each call
(`ExtraGuards.changed`).
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
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.nn.modules import module as _modules
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

from memplan.capturing.patches import attributes as patching
from memplan.runtime.graph import user_calls
from memplan.runtime.graph.compile import GUARDED_SINCE

_STRICT_SETTINGS = {
    "torch._dynamo.config.allow_rnn": True,
    "torch._dynamo.config.assume_dunder_attributes_remain_unchanged": False,
    # Operators in the place of others, whose results are not the same bits.
    "torch._dynamo.config.enable_dynamo_decompositions": False,
    "torch._dynamo.config.guard_nn_modules": True,
    "torch._dynamo.config.guard_nn_modules_using_dict_tags": False,
    "torch._dynamo.config.skip_fsdp_guards": False,
    "torch._dynamo.config.skip_nnmodule_hook_guards": False,
    "torch._dynamo.config.skip_no_tensor_aliasing_guards_on_parameters": False,
    "torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags": False,
    # NumPy's functions as PyTorch's, whose results are not the same bits.
    "torch._dynamo.config.trace_numpy": False,
}
_DYNAMO_SETTINGS = {name.rpartition(".")[2]: value for name, value in _STRICT_SETTINGS.items()}
_KNOWN_DICTS = (dict, OrderedDict, defaultdict)


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Inside, Dynamo also guards what it expects nobody to change: hooks, defaults of functions,
    aliases among parameters, state in modules of the standard library, and more
    (`strict_guards`)."""
    from memplan.runtime.graph.strict_guards import PATCHES  # releases before 2.13 do not have it

    patches = [
        (LoggingLoggerVariable, "call_method", _call_of_a_logger),
        *PATCHES,
        *user_calls.PATCHES,
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(_DYNAMO_SETTINGS))
        for owner, name, instead in patches:
            stack.enter_context(mock.patch.object(owner, name, instead))
        handlers: Any = TorchInGraphFunctionVariable._get_handlers()
        stack.enter_context(mock.patch.dict(handlers)).pop(torch.addcdiv, None)  # a decomposition
        yield


_call_method: Callable[..., Any] = LoggingLoggerVariable.call_method


def _call_of_a_logger(self: Any, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a memoized method of a logger, such as Transformers' `warning_once`, while it is traced:
    later calls do nothing, so the capture stays right without it."""
    method: Any = getattr(getattr(self.value, name, None), "__func__", None)
    known = all(one.is_python_constant() for one in (*args, *kwargs.values()))
    if known and _is_memoized(method):
        values = {key: one.as_python_constant() for key, one in kwargs.items()}
        given = [one.as_python_constant() for one in args]
        with user_calls.USER_CALLS.paused():
            said = method(self.value, *given, **values)
        if said is None:
            return ConstantVariable.create(None)
    return _call_method(self, tx, name, args, kwargs)


def _is_memoized(function: Any) -> bool:
    """Whether a function never runs twice for the same arguments."""
    return isinstance(function, _LRU_CACHE) and function.cache_parameters()["maxsize"] is None


_LRU_CACHE: Any = type(functools.cache(id))


def refusal(module: torch.fx.GraphModule) -> str:
    """Why a captured graph does not compute what the Python code would; empty where it does."""
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
            if formula := _other_formula(node):
                return f"a gradient of {formula}, which PyTorch computes in another way in a trace"
            if node.target is _tensor_version:
                return "a tensor's `_version`, which PyTorch captures as a number"
    return ""


def _other_formula(node: torch.fx.Node) -> str:
    """The operator whose gradient PyTorch computes by another formula in a trace, where it cannot
    see values; empty for other operators."""
    result = node.meta.get("example_value")
    if not (isinstance(result, torch.Tensor) and result.requires_grad):
        return ""
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    given = [*node.args, *node.kwargs.values()]
    if name in ("masked_fill", "masked_fill_"):  # adds up the gradient of its value
        other = any(isinstance(one, torch.fx.Node) and _trains(one) for one in given[1:])
    elif name in ("max", "min", "median", "nanmedian"):  # zeros with the other sign
        other = len(given) == 1 and result.is_cpu
    else:
        other = name == "prod"
    return f"torch.{name}" if other and node.op != "placeholder" else ""


def _trains(node: torch.fx.Node) -> bool:
    return bool(node.meta["example_value"].requires_grad)


def missing_guards() -> str:
    """Why the installed PyTorch's guards do not suffice for any capture; empty if they do."""
    if TorchVersion(torch.__version__) >= GUARDED_SINCE:
        return ""
    return (
        f"guards of PyTorch {torch.__version__} leave out attributes of classes and defaults of "
        "functions; those of 2.13 do not"
    )


def autocast_cache_persists() -> bool:
    """Whether autocast is enabled outside of its context. Its cache of cast weights is then never
    cleared, and later steps would use the weights of the first one."""
    if not (torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()):
        return False
    torch.autocast_increment_nesting()
    return not torch.autocast_decrement_nesting()


def has_saved_tensor_hooks() -> bool:
    """Whether the call is inside `saved_tensors_hooks`, which a graph would not call."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _unguardable(value: Any) -> str:
    """Why no guard notices a change of a value that PyTorch captured; empty where guards do."""
    if isinstance(value, types.GeneratorType):
        return f"a generator: {value.__qualname__}"
    if isinstance(value, type) and _has_custom_instances(value):
        return f"a class that decides by code what its instances are: {value.__qualname__}"
    if isinstance(value, np.ndarray):
        return "a NumPy array, of which guards compare nothing"
    if value is random and TorchVersion(torch.__version__) >= "2.14":
        return "Python's random module"
    return ""


def _has_custom_instances(kind: type) -> bool:
    """Whether code decides what is an instance of a class: a `__subclasshook__` of the user's, or
    `typing.runtime_checkable`, which looks at an object's attributes."""
    code = getattr(getattr(kind, "__subclasshook__", None), "__code__", None)
    asks = code is not None and user_calls.is_user_file(code.co_filename)
    return asks or bool(vars(kind).get("_is_runtime_protocol"))


class ExtraGuards:
    """What captures depend on although no guard compares it: methods of classes, metaclasses,
    classes registered with abstract ones, builtins, and settings of the interpreter."""

    def __init__(self) -> None:
        self.refusal = ""
        """Why a capture cannot be guarded; empty where it can."""
        self._classes: dict[type, list[Any]] = {}
        self._queries: list[tuple[Callable[[], Any], Any]] = []
        """What Dynamo asked the system while it traced, and what enumerations have, with the
        answers."""
        self._names = _builtins()
        self._settings = _settings()

    def record(self, entries: Sequence[GuardFilterEntry]) -> list[bool]:
        """Record what the guards of a capture are about. PyTorch calls this as its filter of
        guards, and keeps those with the answer True: all."""
        from memplan.runtime.graph.strict_guards import (
            pop_queries,
        )  # releases before 2.13 do not have it

        self._queries += pop_queries()
        for entry in entries:
            if entry.has_value:
                for value in _reachable(entry.value):
                    self._record_class(value)
                    self.refusal = self.refusal or _unguardable(value)
                if _is_dict_subclass(entry.value) and _has_attribute_guards(
                    entry.name, entry.value, entries
                ):
                    kind = type(entry.value).__name__
                    self.refusal = f"attributes of a {kind}, a kind of dict, which are not guarded"
        return [True] * len(entries)

    def changed(self) -> bool:
        """Whether anything recorded has changed since."""
        with patching.as_compilers_see():
            return self._changed()

    def _changed(self) -> bool:
        if _settings() != self._settings or not _same(_builtins(), self._names):
            return True
        if any(answer_to(ask) != answer for ask, answer in self._queries):
            return True
        for kind, seen in self._classes.items():
            now = list(vars(kind).values())
            if not _same(now, seen):
                if not _same(_behaviour(kind, now), _behaviour(kind, seen)):
                    return True
                self._classes[kind] = now  # only data changed, which Dynamo guards where it is read
        return False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """For what runs between capture and call. It imports modules that register classes with
        abstract ones, which is no change that the captured function could notice."""
        before = _settings()
        yield
        if self._settings == before:
            self._settings = _settings()

    def _record_class(self, value: Any) -> None:
        of_class = type.mro(value) if isinstance(value, type) and value is not type else []
        for kind in (*of_class, *type(value).__mro__):
            if kind not in self._classes and kind.__flags__ & _HEAP_TYPE:
                self._classes[kind] = list(vars(kind).values())
                if issubclass(kind, enum.Enum):
                    known = tuple(dict(of) for of in _members(kind))
                    ask = functools.partial(_still_has, kind, known)
                    self._queries.append((ask, answer_to(ask)))


def answer_to(ask: Callable[[], Any]) -> Any:
    """The answer to a query, in a form in which `==` also compares types and signs of zero."""
    try:
        found = ask()
    except Exception as error:
        return type(error)
    return type(found), repr(found) if isinstance(found, float) else found


def _members(kind: type[enum.Enum]) -> tuple[dict[Any, Any], ...]:
    """The members of an enumeration, by name and by value."""
    return kind._member_map_, kind._value2member_map_


def _still_has(kind: type[enum.Enum], known: tuple[dict[Any, Any], ...]) -> bool:
    """Whether an enumeration has these members. Flags create more when they are combined."""
    return all(map(operator.le, map(dict.items, known), map(dict.items, _members(kind))))


_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE, the flag of classes that Python code can change."""


def _builtins() -> list[Any]:
    return [*vars(builtins), *vars(builtins).values()]


def _settings() -> tuple[object, ...]:
    """Settings that PyTorch's compiler treats as constants."""
    distributed = torch.distributed
    return (
        abc.get_cache_token(),
        sys.getrecursionlimit(),
        sys.get_int_max_str_digits(),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        distributed.is_available() and distributed.is_initialized(),
        sys.float_info.min / _TWO == 0,  # torch.set_flush_denormal
        *(ask() for ask in _KERNEL_CHOICES),
        *(tuple(vars(_modules)[name].values()) for name in _HOOKS),
    )


_KERNEL_CHOICES: tuple[Callable[[], object], ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    lambda: torch.backends.mkldnn.enabled,
    lambda: torch.backends.cudnn.enabled,
)
"""Settings that choose kernels of attention and recurrent cells while a graph is traced."""
_TWO = 2.0
_HOOKS = [name for name, kept in vars(_modules).items() if type(kept) is OrderedDict]
"""Names of the dicts that hold global hooks, as of `register_module_forward_hook`."""


def _same(these: list[Any], those: list[Any]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _behaviour(kind: type, values: list[Any]) -> list[Any]:
    """A class's functions and other descriptors; everything for a metaclass."""
    if issubclass(kind, type):
        return values
    return [value for value in values if hasattr(type(value), "__get__")]


def _reachable(value: Any) -> Iterator[Any]:
    """A value; for a function also the values in its closure and the globals that it names."""
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


def _is_dict_subclass(value: Any) -> bool:
    return isinstance(value, dict) and type(value) not in _KNOWN_DICTS


def _has_attribute_guards(name: str, value: Any, entries: Sequence[GuardFilterEntry]) -> bool:
    """Whether guards read attributes of a dict-like object. Closures of its methods that hold the
    class, for `super`, do not count."""
    return any(
        other.name.startswith((f"{name}.", f"type({name})")) or f"(type({name})" in other.name
        for other in entries
        if not (other.name.endswith(".cell_contents") and other.has_value)
        or not any(other.value is kind for kind in type(value).__mro__)
    )
