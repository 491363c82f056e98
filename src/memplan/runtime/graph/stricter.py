"""Guards that Dynamo does not make while it traces a function.

Which object it is: Dynamo guards an object of a user's class by its class and by what is read of
it. Where a function asks which one it is (`is`, `==` of a class without `__eq__`, a hash, a member
of a set), another one of the same class would get the old answer. The objects that were asked about
are guarded themselves, as Dynamo guards functions.

Functions that Dynamo finds without knowing where: methods of an object that the traced function
makes, some special methods. What they close over and their defaults would be taken once. They are
kept in a global, which is where they are found then.

What is not there: a key or an attribute that a function looks for in vain, and what else `vars` of
an object has, may be there at the next call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import GlobalSource
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables import builtin, object_protocol
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import GetAttrBuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable, DunderDictVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.hashable import HashableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import ObjectVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import Source

_GUARDED = (ConstantVariable, SymNodeVariable, TensorVariable)
"""By value, or by which of them are the same."""
_compare: Callable[..., Any] = object_protocol.vt_identity_compare
_hash_impl: Callable[..., Any] = UserDefinedObjectVariable.hash_impl
_get_source: Callable[..., Any] = UserFunctionVariable.get_source
_load: Callable[..., Any] = InstructionTranslatorBase._load_attr
_get_attribute: Callable[..., Any] = GetAttrBuiltinVariable._call_getattr
_get_item: Callable[..., Any] = ConstDictVariable.getitem_const_raise_exception_if_absent
_make_key: Callable[..., None] = HashableTracker.__init__


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
        one = one.realize()
    _guard_if_hashed_by_identity(one)
    _make_key(self, one)


def _guard_if_hashed_by_identity(one: Any) -> None:
    of_user = isinstance(one, (ObjectVariable, UserDefinedObjectVariable))
    if of_user and vars(object)["__hash__"] is type(one.value).__hash__:
        _guard(one)


def _source(self: Any) -> Source | None:
    return _get_source(self) or getattr(self, "source_fn", None) or _place_of(self.fn)


def _place_of(function: Any) -> Source | None:
    """Where guards find a function; None where there is nothing to guard."""
    held = ("__closure__", "__defaults__", "__kwdefaults__")
    own = f"{getattr(function, '__module__', None)}.".startswith("torch.")
    if own or not any(getattr(function, name, None) for name in held):
        return None
    scope = InstructionTranslator.current_tx().output
    return GlobalSource(scope.install_global_by_id("function", function))


def _load_attr(self: Any, attribute: Any) -> Any:
    of = self.stack[-1]
    try:
        return _load(self, attribute)
    except ObservedAttributeError:
        _guard_absence(of, attribute)
        raise


def _getattr(self: Any, tx: Any, args: Sequence[VariableTracker], kwargs: Any) -> Any:
    try:
        return _get_attribute(self, tx, args, kwargs)
    except ObservedAttributeError:
        _guard_absence(args[0], args[1].as_python_constant())
        raise


def _guard_absence(of: VariableTracker, attribute: str) -> None:
    _guard(of, functools.partial(GuardBuilder.HASATTR, attr=attribute))


def _getitem(self: Any, tx: Any, key: VariableTracker) -> Any:
    if key not in self:
        self.install_dict_contains_guard(tx, [key])
    return _get_item(self, tx, key)


def _guard_all_keys(self: VariableTracker, *_args: Any) -> None:
    _guard(self, GuardBuilder.DICT_KEYS_MATCH)


def _guard(one: VariableTracker, how: Any = GuardBuilder.ID_MATCH) -> None:
    if one.source is not None:
        install_guard(one.source.make_guard(how))


PATCHES: list[tuple[Any, str, Any]] = [
    (builtin, _compare.__name__, _is),
    (object_protocol, _compare.__name__, _is),
    (UserDefinedObjectVariable, _hash_impl.__name__, _hash),
    (HashableTracker, _make_key.__name__, _key),
    (UserFunctionVariable, _get_source.__name__, _source),
    (InstructionTranslatorBase, _load.__name__, _load_attr),
    (GetAttrBuiltinVariable, _get_attribute.__name__, _getattr),
    (ConstDictVariable, _get_item.__name__, _getitem),
    (DunderDictVariable, "install_dict_keys_match_guard", _guard_all_keys),
    (DunderDictVariable, "install_dict_contains_guard", _guard_all_keys),
]
"""In effect while a function is captured: of which module or class, the name, what instead."""
