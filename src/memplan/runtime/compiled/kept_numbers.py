"""Symbolic numbers that a recorded step leaves behind, and the plain ones that take their place."""

from __future__ import annotations

import ctypes
import gc
import types
from collections import deque
from typing import Any

from torch import fx

from memplan.runtime.compiled.look_alikes import alive
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.program import facts_of
from memplan.runtime.compiled.python_items import slots_of
from memplan.runtime.compiled.scalars import Symbolic, scalar_of


def plain_numbers(value: Any) -> Any:
    """A step's result with plain numbers, its own lists and dicts left in place."""
    if isinstance(value, Symbolic):
        scalar = scalar_of(value)
        return value if scalar is None else scalar.value
    if isinstance(value, dict):
        for key, item in value.items():
            if (plain := plain_numbers(item)) is not item:
                value[key] = plain
    elif isinstance(value, list):
        value[:] = map(plain_numbers, value)
    elif isinstance(value, tuple):
        items = [plain_numbers(item) for item in value]
        if any(item is not before for item, before in zip(items, value, strict=True)):
            return tuple.__new__(type(value), items)
    return value


def put_back(recorder: Any) -> NotCapturable | None:
    """Plain numbers for those that the step has put somewhere: nobody may find another kind of
    number there later. Tells of one, if there are any.

    What refers to them is asked of the garbage collector, which looks at all objects: a step that
    keeps no number does not pay for it.
    """
    numbers = alive(recorder)
    found = None
    while numbers:
        number = numbers.pop()
        if where := _replace(number, number.node.value, ()):
            found = NotCapturable(
                f"it keeps a number read from a tensor {where}",
                _source(number.node.node),
                "return it, and keep it outside the step",
            )
    return found


def _source(node: fx.Node | None) -> str:
    """The line that read the number from which `node` is computed."""
    while node is not None and node.op == "call_function":
        if source := facts_of(node).source:
            return source
        node = next(iter(node.all_input_nodes), None)
    return ""


_DEEPEST = 4
"""Tuples in tuples."""


def _replace(old: Any, new: Any, mine: tuple[Any, ...], depth: int = 0) -> str:
    """`mine`: holders of ours. No function within may name `old`: it would be in a cell of ours."""
    holders = gc.get_referrers(old)
    mine = (*mine, holders)
    where = ""
    for holder in holders:
        if _is_among(holder, mine) or isinstance(holder, types.FrameType):
            continue
        if isinstance(holder, tuple):
            if depth < _DEEPEST:
                where = _replace(holder, _with(holder, old, new), mine, depth + 1) or where
        else:
            where = _put(holder, old, new) or where
    return where


def _is_among(holder: Any, mine: tuple[Any, ...]) -> bool:
    return any(holder is own for own in mine)


def _with(items: tuple[Any, ...], old: Any, new: Any) -> tuple[Any, ...]:
    return tuple.__new__(type(items), [new if item is old else item for item in items])


def _put(holder: Any, old: Any, new: Any) -> str:
    """Puts `new` where `holder` has `old`; says where that is."""
    if isinstance(holder, types.CellType):
        holder.cell_contents = new
        return "in a variable"
    if isinstance(holder, types.GeneratorType):
        return _put_into_frame(holder.gi_frame, old, new)
    if isinstance(holder, (list, deque)):
        return _put_all(holder, [n for n, item in enumerate(holder) if item is old], new)
    if isinstance(holder, dict):
        return _put_all(holder, [key for key, item in holder.items() if item is old], new)
    if isinstance(holder, set):
        holder.discard(old)  # it has the hash of `new`, and is equal
        holder.add(new)
        return "in a set"
    if isinstance(holder, types.FunctionType) and holder.__defaults__ is old:
        holder.__defaults__ = new
        return f"in a default of {holder.__name__}"
    own = getattr(holder, "__dict__", None)
    where = _put(own, old, new) if isinstance(own, dict) else ""
    for name in slots_of(holder):
        if getattr(holder, name, None) is old:
            setattr(holder, name, new)
            where = f"as {name}"
    return where


def _put_all(holder: Any, places: list[Any], new: Any) -> str:
    for place in places:
        holder[place] = new
    if not places:
        return ""
    return f"as {places[0]}" if isinstance(places[0], str) else f"in a {type(holder).__name__}"


def _put_into_frame(frame: types.FrameType | None, old: Any, new: Any) -> str:
    if frame is None:
        return ""
    variables = frame.f_locals
    where = _put_all(variables, [name for name, one in variables.items() if one is old], new)
    # Before Python 3.13 `f_locals` is a copy.
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return where
