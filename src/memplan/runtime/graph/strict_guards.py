"""Guards that Dynamo does not make while it traces a function.

Identity. Dynamo guards an object of a user's class by its class and by the attributes that are
read. Where the function depends on the object's identity (`is`, `==` of a class without `__eq__`, a
hash, membership in a set), another object of the same class would get the old answer. Such objects
are guarded by identity here.

Aliases. An object may be reached in two ways, one of them through a global. Dynamo guards only one
of them. It guards no classes that are reached through a closure.

Functions without a source: methods of objects that the traced function creates, and some special
methods. Dynamo would never look at their closures and defaults again. Here they are stored in a
global, so that guards can reach them.

Absence. A key or attribute that the function looks for in vain, or that `vars` of an object does
not have yet, may exist at the next call.

Values that `==` does not distinguish: the sign of a zero, `1`, `True` and `1.0` in a set or as a
key, and the order of a set's or dict's items.

Queries. Dynamo asks the system while it traces and puts the answer into the graph as a constant:
whether a package is installed, its version, which module has a name, and the result of a function
with a cache. They are asked again before each call (`pop_queries`).

Many places of Dynamo are patched because it has no single one that decides this. Its filter of
guards can remove guards but not add any, and a guard does not say with which object another one was
compared, or what was looked for in vain. To guard every object by identity would be one place, but
each call gets a new batch and would then be captured again.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch._C._dynamo.guards import DictGuardManager
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import ObservedAttributeError, unimplemented
from torch._dynamo.guards import GuardBuilder, _get_closure_vars, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import AttrSource, GlobalSource
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables import builder, builtin, functions, object_protocol
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import GetAttrBuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable, DunderDictVariable
from torch._dynamo.variables.functions import (
    SkipFunctionVariable,
    UserFunctionVariable,
    WrapperUserFunctionVariable,
)
from torch._dynamo.variables.hashable import HashableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import ObjectVariable, SuperVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import Source

from memplan.runtime.graph.extra_guards import answer_to
from memplan.runtime.graph.user_calls import USER_CALLS, is_user_file

Query = tuple[Callable[[], Any], Any]
_GUARDED = (ConstantVariable, SymNodeVariable, TensorVariable)
"""Dynamo guards these by value, or by which of them are the same object."""
_compare: Callable[..., Any] = object_protocol.vt_identity_compare
_hash_impl: Callable[..., Any] = UserDefinedObjectVariable.hash_impl
_get_source: Callable[..., Any] = UserFunctionVariable.get_source
_load: Callable[..., Any] = InstructionTranslatorBase._load_attr
_get_attribute: Callable[..., Any] = GetAttrBuiltinVariable._call_getattr
_make_dict: Callable[..., None] = ConstDictVariable.__init__
_guard_keys: Callable[..., None] = ConstDictVariable.install_dict_keys_match_guard
_import: Callable[..., Any] = InstructionTranslatorBase.import_source
_get_of_super: Callable[..., Any] = SuperVariable._resolved_getattr_and_source
_call_skip: Callable[..., Any] = SkipFunctionVariable.call_function
_EQUAL = "is_python_equal"
_equal: Any = getattr(UserDefinedObjectVariable, _EQUAL, None)
_DUPE = "make_dupe_guard"
_make_dupe_guard: Callable[..., Any] = getattr(builder, _DUPE)
_call_wrapped: Callable[..., Any] = WrapperUserFunctionVariable.call_function
_load_a_builtin: Callable[..., Any] = InstructionTranslatorBase.load_builtin_from_argval
_make_key: Callable[..., None] = HashableTracker.__init__


def _refuse(what: str, why: str) -> NoReturn:
    unimplemented(gb_type=what, context="", explanation=why, hints=[])


def _is(left: VariableTracker, right: VariableTracker) -> Any:
    found = _compare(left, right)
    if left is not right and not any(isinstance(one, _GUARDED) for one in (left, right)):
        _guard(left)
        _guard(right)
    return found


def _hash(self: Any, *args: Any) -> Any:
    _guard_if_hashed_by_identity(self)
    return _hash_impl(self, *args)


def _key(self: Any, one: VariableTracker) -> None:
    if isinstance(one, LazyVariableTracker):
        if not one.is_realized() and one.is_hashable_lazy():
            _guard(one)  # a function or a class, of which Dynamo hashes some only so
            _make_key(self, one)
            return
        one = one.realize()
    _guard_if_hashed_by_identity(one)
    _make_key(self, one)


def _is_equal(self: Any, other: Any) -> bool:
    """Equality of dict keys and set members: Dynamo compares identity, not by `__eq__`."""
    values = [one.value for one in (self, other) if isinstance(one, UserDefinedObjectVariable)]
    if values[0] is values[-1] is not None and len(values) == 2:
        _guard(self)
        _guard(other)
    elif any(vars(object)["__eq__"] is not type(value).__eq__ for value in values):
        _refuse(
            "keys that are compared by `__eq__`", "Dynamo would compare which objects they are."
        )
    return bool(_equal(self, other))


def _guard_if_hashed_by_identity(one: Any) -> None:
    is_user_file = isinstance(one, (ObjectVariable, UserDefinedObjectVariable))
    if is_user_file and vars(object)["__hash__"] is type(one.value).__hash__:
        _guard(one)


def _source(self: Any) -> Source | None:
    return _get_source(self) or getattr(self, "source_fn", None) or _place_of(self.fn)


def _place_of(function: Any) -> Source | None:
    """A source by which guards reach a function; None where it has nothing to guard."""
    held = ("__closure__", "__defaults__", "__kwdefaults__")
    own = f"{getattr(function, '__module__', None)}.".startswith("torch.")
    if own or not any(getattr(function, name, None) for name in held):
        return None
    scope = InstructionTranslator.current_tx().output
    return GlobalSource(scope.install_global_by_id("function", function))


def _get_above(self: Any, tx: Any, name: str) -> tuple[Any, Source | None]:
    """What `super` finds. Dynamo passes over what counts as false, does not guard that the classes
    before do not have it, and has no source for the class of an object that it created."""
    value, source = _get_of_super(self, tx, name)
    kind = self.objvar.python_type()
    ask = functools.partial(
        _owner,
        self.typevar.as_python_constant(),
        self.objvar.value if issubclass(kind, type) else kind,
        name,
    )
    owner = ask()
    if owner is None or vars(owner)[name] is not value:
        _refuse("an attribute that counts as false", "Dynamo would look for it in the next class.")
    _query((_owner, *ask.args), ask)
    if source is None and not hasattr(type(value), "__get__"):
        source = AttrSource(GlobalSource(tx.output.install_global_by_id("class", owner)), name)
    return value, source


def _owner(below: type, kind: type, name: str) -> type | None:
    """The class in which `super(below, kind)` finds an attribute."""
    after = kind.__mro__.index(below) + 1 if below in kind.__mro__ else 0
    return next((one for one in kind.__mro__[after:] if name in vars(one)), None)


def _load_attr(self: Any, attribute: Any) -> Any:
    of = self.stack[-1]
    if isinstance(of, TensorVariable):
        why = ""
        if attribute == "_base":
            why = "No guard compares of what a tensor is a view."
        elif attribute == "grad" and of.proxy.node.meta["example_value"].grad is not None:
            why = "The loss reads a gradient of an earlier call, which the step changes."
        if why:
            _refuse(f"a tensor's `{attribute}`", why)
    try:
        return _load(self, attribute)
    except ObservedAttributeError:
        _guard_absence(of, attribute)
        raise


def _same_object(source: Source, known: Source | None) -> Any:
    """A guard that two sources are one object. Dynamo has none for a local and a global."""
    found = _make_dupe_guard(source, known)
    if found is None and known is not None and known != source:
        return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=known)
    return found


def _getattr(self: Any, tx: Any, args: Sequence[VariableTracker], kwargs: Any) -> Any:
    kind = args[0].python_type() if args[1].as_python_constant() == "__reduce_ex__" else object
    if issubclass(kind, (dict, list)):
        _refuse("a copy of a container", "Dynamo (PyTorch 2.13) would leave out what is in it.")
    try:
        return _get_attribute(self, tx, args, kwargs)
    except ObservedAttributeError:
        _guard_absence(args[0], args[1].as_python_constant())
        raise


def _guard_absence(of: VariableTracker, attribute: str) -> None:
    _guard(of, functools.partial(GuardBuilder.HASATTR, attr=attribute))


def _dict(self: Any, *args: Any, **kwargs: Any) -> None:
    """Guard all keys of a dict, in their order. Dynamo guards those that are found, and the others
    in some of its methods."""
    _make_dict(self, *args, **kwargs)
    by_keys = type(self).install_dict_keys_match_guard is _guard_keys  # not those of modules' hooks
    if by_keys and self.source is not None:
        _guard_keys(self)
        InstructionTranslator.current_tx().output.guard_on_key_order.add(self.source)


def _guard_all_keys(self: VariableTracker, *_args: Any) -> None:
    _guard(self, GuardBuilder.DICT_KEYS_MATCH)


def _exactly(
    compare: Callable[..., None], is_inexact: Callable[[Any], bool]
) -> Callable[..., None]:
    """A guard that also compares what `==` does not distinguish."""

    def guard_exactly(self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        compare(self, guard, *args, **kwargs)
        value = self.get(guard)
        if not is_inexact(value):
            return
        known, words = _exact(value), [f"{guard.name} exactly"]

        def same(now: Any) -> bool:
            return bool(_exact(now) == known)

        manager = self.get_guard_manager(guard)
        if isinstance(manager, DictGuardManager):  # which takes no functions
            of_guards = {**_get_closure_vars(), "___same": same}
            code = [f"___same({self.arg_ref(guard)})"]
            self.add_python_lambda_leaf_guard_to_root(code, words, of_guards)
        else:
            manager.add_lambda_guard(same, words, guard.user_stack)

    return guard_exactly


def _is_inexact(value: Any) -> bool:
    """Whether a different value of the same type may be equal to this one."""
    if isinstance(value, dict):
        return not all(isinstance(key, str) for key in value)
    if isinstance(value, (complex, np.inexact)):
        return 0 in (value.real, value.imag)
    return isinstance(value, _SEVERAL) or (isinstance(value, float) and value == 0)


def _is_ordered(value: Any) -> bool:
    return isinstance(value, OrderedDict) and len(value) > 1


def _exact(value: Any) -> Any:
    if isinstance(value, dict):
        return [_exact(key) for key in value]
    if isinstance(value, _SEVERAL):
        return type(value), [_exact(one) for one in value]
    if isinstance(value, torch.Tensor):
        return id(value)
    return type(value), repr(value) if isinstance(value, _INEXACT) else value


_INEXACT = (float, complex, np.inexact)
_SEVERAL = (tuple, list, set, frozenset)


def _load_builtin(self: Any, name: str) -> Any:
    """A global of a builtin's name, defined later, would take its place."""
    key = id(self.f_globals), name
    _query(key, functools.partial(operator.contains, self.f_globals, name))
    return _load_a_builtin(self, name)


def _import_source(self: Any, name: str) -> Any:
    """Dynamo imports a module once; `sys.modules` may have another one next time."""
    found = _import(self, name)
    _query(("module", name), functools.partial(sys.modules.get, name))
    return found


def _call_skipped(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Dynamo calls these functions while it traces and uses the results as constants."""
    result = _call_skip(self, tx, args, kwargs)
    if self.value in (importlib.util.find_spec, importlib.metadata.version):
        given = [one.as_python_constant() for one in args]
        _query((self.value, *given), functools.partial(self.value, *given))
    return result


def _call_cached(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function with a cache (`functools.lru_cache`). Dynamo would trace the function inside;
    here the call gives the cached result, if that is a constant."""
    cached = self.wrapper_obj
    code = getattr(getattr(cached, "__wrapped__", None), "__code__", None)
    if not hasattr(cached, "cache_info") or code is None or not is_user_file(code.co_filename):
        return _call_wrapped(self, tx, args, kwargs)
    known = all(one.is_python_constant() for one in (*args, *kwargs.values()))
    if known and not self.self_args():
        given = [one.as_python_constant() for one in args]
        named = {key: one.as_python_constant() for key, one in kwargs.items()}
        ask = functools.partial(cached, *given, **named)
        with USER_CALLS.paused():
            result = ask()
        known = ConstantVariable.is_literal(result)
    if not known or self.self_args():
        _refuse(
            "a function with a cache",
            "Dynamo would run it again in each call, whatever is in its cache.",
        )
    _query((cached, repr((given, named))), ask)
    return ConstantVariable.create(result)


def _query(key: tuple[Any, ...], ask: Callable[[], Any]) -> None:
    with USER_CALLS.paused():
        _queries[key] = ask, answer_to(ask)


_queries: dict[tuple[Any, ...], Query] = {}


def pop_queries() -> list[Query]:
    """The queries since the last call of this function, with their answers."""
    found = list(_queries.values())
    _queries.clear()
    return found


def _guard(one: VariableTracker, how: Any = GuardBuilder.ID_MATCH) -> None:
    if one.source is not None:
        install_guard(one.source.make_guard(how))


_SKIPS = "SkipGuardSource"
"""Dynamo's class of sources without guards: the standard library, `inspect`, annotations."""
_SKIPPING = (symbolic_convert, builder, functions)
_IN_CLOSURES = "is_from_closure_source"
"""Dynamo's test for classes that are reached through a closure. They get no guards, for `super`."""
_INEXACT_GUARDS = [
    ("EQUALS_MATCH", _is_inexact),
    ("DICT_KEYS_MATCH", _is_inexact),
    ("CONSTANT_SUBCLASS_MATCH", _is_inexact),
    ("SEQUENCE_LENGTH", _is_ordered),
]


def _prune_inputs(self: OutputGraph) -> None:
    """Keep a tensor that nothing but a guard reads among the graph's inputs, of which `StepCapture`
    checks before each call that they share no memory that is written."""
    (output,) = self.graph.find_nodes(op="output")
    for node in self.placeholders:
        made = node.meta.get("example_value")
        read = isinstance(made, torch.Tensor) and not (made.requires_grad and made.dim())
        if read and all(user.target == "item" for user in node.users):
            with self.graph.inserting_before(output):
                self.graph.call_method("detach", (node,)).meta["example_value"] = made
    _prune(self)


_prune: Callable[[OutputGraph], None] = OutputGraph.remove_unused_graphargs
PATCHES: list[tuple[Any, str, Any]] = [
    (builtin, _compare.__name__, _is),
    (object_protocol, _compare.__name__, _is),
    (UserDefinedObjectVariable, _hash_impl.__name__, _hash),
    # PyTorch 2.15 traces `__eq__`.
    *([(UserDefinedObjectVariable, _EQUAL, _is_equal)] if _equal is not None else []),
    (InstructionTranslatorBase, _load_a_builtin.__name__, _load_builtin),
    (WrapperUserFunctionVariable, _call_wrapped.__name__, _call_cached),
    *((module, _SKIPS, lambda source: source) for module in _SKIPPING if hasattr(module, _SKIPS)),
    (builder, _DUPE, _same_object),
    *([(builder, _IN_CLOSURES, lambda _source: False)] if hasattr(builder, _IN_CLOSURES) else []),
    (InstructionTranslatorBase, _import.__name__, _import_source),
    (SuperVariable, _get_of_super.__name__, _get_above),
    (HashableTracker, _make_key.__name__, _key),
    (UserFunctionVariable, _get_source.__name__, _source),
    (InstructionTranslatorBase, _load.__name__, _load_attr),
    (GetAttrBuiltinVariable, _get_attribute.__name__, _getattr),
    (ConstDictVariable, _make_dict.__name__, _dict),
    # Parameters of an optimizer that was looked at would be constants of the graph.
    (builder, "get_static_address_type", lambda _tensor: None),
    (OutputGraph, _prune.__name__, _prune_inputs),
    (SkipFunctionVariable, _call_skip.__name__, _call_skipped),
    *((GuardBuilder, name, _exactly(vars(GuardBuilder)[name], of)) for name, of in _INEXACT_GUARDS),
    (DunderDictVariable, "install_dict_keys_match_guard", _guard_all_keys),
    (DunderDictVariable, "install_dict_contains_guard", _guard_all_keys),
]
"""Patches while a function is captured: the module or class, the attribute, the replacement."""
