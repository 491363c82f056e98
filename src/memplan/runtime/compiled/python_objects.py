"""What objects keep outside of Python's attributes and items: how far an iterator has come, the
state of a generator, what a cache has seen."""

from __future__ import annotations

import contextvars
import functools
import gc
import operator
import random
import sys
import types
import weakref
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from memplan.runtime.compiled.python_items import LARGEST, MISSING, PLAIN, POSITION

_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_VIEWS: tuple[type, ...] = (
    types.MappingProxyType,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_UNFOLLOWED = (type, types.ModuleType, types.CodeType, types.FrameType)


def content_of(value: Any) -> Callable[[], dict[Any, Any]] | None:
    """How to read it, as text, bytes or numbers; None where it is no such object."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return lambda: {POSITION: repr(value.getstate())}
    if isinstance(value, (bytearray, array)):
        return lambda: {POSITION: bytes(memoryview(value)[:LARGEST])}
    if isinstance(value, memoryview) and value.nbytes <= LARGEST:
        return lambda: {POSITION: value.tobytes()}
    if is_cache(value):
        return lambda: _cached(value)
    if isinstance(value, contextvars.ContextVar):
        return lambda: {"value": value.get(MISSING)}
    if is_iterator(value):
        return lambda: _position(value)
    if type(value).__module__ == "torch.utils.data.dataloader" and hasattr(value, "_num_yielded"):
        return lambda: {POSITION: value._num_yielded}
    return _of_numpy(value)


def is_cache(value: Any) -> bool:
    """Whether it is a function with `functools.lru_cache` around it."""
    return isinstance(value, functools._lru_cache_wrapper)


def _cached(function: Any) -> dict[Any, Any]:
    """Results that a `functools.lru_cache` has, or links to them, which are others after it was
    cleared."""
    caches = [
        held
        for held in gc.get_referents(function)
        if type(held) is dict and held is not function.__dict__
    ]
    return dict(enumerate(item for cache in caches for item in cache.values()))


def _of_numpy(value: Any) -> Callable[[], dict[Any, Any]] | None:
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return lambda: {POSITION: repr(value.bit_generator.state)}
    if isinstance(value, numpy.random.RandomState):
        return lambda: {POSITION: repr(value.get_state(legacy=False))}
    if isinstance(value, numpy.ndarray) and value.nbytes <= LARGEST:
        if value.dtype.hasobject:
            return lambda: {POSITION: repr(value.tolist())}
        return lambda: {POSITION: value.tobytes()}
    return None


def is_iterator(value: Any) -> bool:
    """Whether it is one of Python's own iterators, or a generator."""
    return isinstance(value, types.GeneratorType) or (
        hasattr(type(value), "__next__") and type(value).__module__ in _OF_ITERATORS
    )


_OF_ITERATORS = ("builtins", "itertools", "collections", "_collections")


def _position(value: Any) -> dict[Any, Any]:
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        plain = [repr(v) for v in frame.f_locals.values() if isinstance(v, PLAIN)] if frame else []
        return {POSITION: (frame.f_lasti if frame else -1, *plain)}
    try:
        _, arguments, *state = value.__reduce__()
    except (TypeError, AttributeError, ValueError):
        return {POSITION: operator.length_hint(value, -1)}
    return {POSITION: repr(state[0]) if state else repr(arguments)}


def behind(value: Any) -> Iterator[Any]:
    """Objects that it works on and shows no other way."""
    if isinstance(value, _BOUND):
        if not isinstance(value.__self__, types.ModuleType):
            yield value.__self__
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, _VIEWS) or is_iterator(value):
        yield from (one for one in gc.get_referents(value) if not isinstance(one, _UNFOLLOWED))
    elif type(value).__module__ == "numpy" and getattr(value, "dtype", "") == "O":
        yield value.tolist()
