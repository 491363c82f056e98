"""Brings what a script's loop does every so many steps forward to the end of a capture.

`if step % 1000 == 0: evaluate()` is reached after hours. So once enough steps were seen and the
loader runs dry, the counter in the frame of the training loop is set to a value for which such
conditions hold. Only conditions count that come after the optimizer step in the same turn of the
loop, in a file of the job's own, and that only compute with counters.
"""

from __future__ import annotations

import ast
import ctypes
import math
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import permutations
from types import FrameType
from typing import Any

from memplan.capturing.recording.context import shown_path, syntax_of
from memplan.types.installed import is_installed

_ARITHMETIC = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)
_COUNTERS = (ast.Name, ast.Attribute)
_LONGEST_PERIOD = 10**9
_parsed = lru_cache(syntax_of)


def bring_forward(frame: FrameType | None) -> int:
    """Set counters of loops in `frame` and its callers so that what happens every so many turns
    happens in this one. Returns the number of conditions that hold because of that."""
    count = 0
    while frame is not None:
        if not is_installed(frame.f_code.co_filename):
            for name, tests in _by_counter(frame).items():
                count += _set(frame, name, tests)
        frame = frame.f_back
    return count


def later_conditions(frame: FrameType | None) -> list[str]:
    """Conditions and stages of the loop around a step, in `frame` and its callers, that a counter
    will decide otherwise: `step < 1000 (train.py:7)`, `step // 1000 (train.py:8)`.
    Conditions with which a loop ends are none."""
    found = []
    while frame is not None:
        if not is_installed(frame.f_code.co_filename):
            loops = _loops_around(frame)
            for test, counters in _tests(loops) if loops else ():
                found += [
                    f"{ast.unparse(one)} ({shown_path(frame.f_code.co_filename)}:{one.lineno})"
                    for one in ast.walk(test)
                    if isinstance(one, ast.Compare) or one is test
                    if _is_ahead(one, counters, frame)
                ]
        frame = frame.f_back
    return found


def _tests(loops: list[ast.For | ast.While]) -> Iterator[tuple[ast.expr, set[str]]]:
    """Conditions and whole divisions in the outermost loop, with the counters of the innermost and
    of its turns."""
    inner = max(loops, key=lambda one: one.lineno)
    named = ast.walk(inner.target) if isinstance(inner, ast.For) else ()
    raised = [one.target for one in ast.walk(inner) if isinstance(one, ast.AugAssign)]
    counters = {ast.unparse(one) for one in (*named, *raised) if isinstance(one, _COUNTERS)}
    for node in ast.walk(min(loops, key=lambda one: one.lineno)):
        ends = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Break | ast.Return)
        if isinstance(node, ast.If | ast.IfExp) and not ends:
            yield node.test, counters
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
            yield node, counters


def _is_ahead(tested: ast.expr, counters: set[str], frame: FrameType) -> bool:
    """Whether a counter is compared with, or divided by, a number that it has yet to reach."""
    if not all(isinstance(node, _ARITHMETIC) for node in ast.walk(tested)):
        return False
    if not isinstance(tested, ast.Compare | ast.BinOp):
        return False
    right = tested.comparators[0] if isinstance(tested, ast.Compare) else tested.right
    for one, other in permutations((tested.left, right)):
        if _counts(one, counters):
            now, then = (
                _computed(side, {**frame.f_globals, **frame.f_locals}) for side in (one, other)
            )
            return isinstance(now, int) and isinstance(then, int) and then > now + 1
    return False


def _counts(side: ast.expr, counters: set[str]) -> bool:
    """Whether it is a counter, or a sum or difference with one: `step - last`."""
    if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Add | ast.Sub):
        return _counts(side.left, counters) or _counts(side.right, counters)
    return isinstance(side, _COUNTERS) and ast.unparse(side) in counters


def _by_counter(frame: FrameType) -> dict[str, list[ast.If]]:
    """Conditions that still come in this turn of the loop, by the counter that they divide."""
    around, line = _loops_around(frame), frame.f_lineno
    if not around:
        return {}
    found: dict[str, list[ast.If]] = {}
    for node in ast.walk(max(around, key=lambda one: one.lineno)):
        if isinstance(node, ast.If) and node.lineno > line:
            name = _divided(node.test)
            if name is not None and isinstance(_value(frame, name), int):
                found.setdefault(name, []).append(node)
    return found


def _loops_around(frame: FrameType) -> list[ast.For | ast.While]:
    """The loops of a frame's function that the line that runs is in."""
    tree, line = _parsed(frame.f_code.co_filename), frame.f_lineno
    inside = _function(tree, frame)
    return [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.For | ast.While)
        and one.lineno <= line <= (one.end_lineno or 0)
        and (inside is None or one.lineno >= inside.lineno)
    ]


def _function(tree: ast.Module, frame: FrameType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = {node.lineno, *(one.lineno for one in node.decorator_list)}
            if node.name == frame.f_code.co_name and frame.f_code.co_firstlineno in lines:
                return node
    return None


def _divided(test: ast.expr) -> str | None:
    """The counter whose remainder a condition tests; None for a condition that does more."""
    nodes = list(ast.walk(test))
    if not all(isinstance(node, _ARITHMETIC) for node in nodes):
        return None
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            for part in ast.walk(node.left):
                if isinstance(part, _COUNTERS):
                    return ast.unparse(part)
    return None


def _value(frame: FrameType, name: str) -> Any:
    return _computed(_expression(name), {**frame.f_globals, **frame.f_locals})


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _set(frame: FrameType, name: str, tests: list[ast.If]) -> int:
    """Set the counter to a value for which most of the conditions hold. Returns how many do."""
    now = int(_value(frame, name))

    def holds(value: int) -> int:
        names = {**frame.f_globals, **frame.f_locals}
        return sum(
            bool(_computed(_with(one.test, name, value + _added(frame, name, one)), names))
            for one in tests
        )

    periods = [period for one in tests for period in _periods(one.test, frame)]
    if not periods or math.lcm(*periods) > _LONGEST_PERIOD:
        return 0
    near = [
        now + (shift - now) % period
        for period in {math.lcm(*periods), *periods}
        for shift in (0, -1, 1)
    ]
    best = max(near, key=lambda value: (holds(value), -value))
    if holds(best) <= holds(now):
        return 0
    owner, _, attribute = name.rpartition(".")
    if owner:
        with suppress(AttributeError):  # a property that the job cannot set either
            setattr(_value(frame, owner), attribute, best)
        return holds(best) if _value(frame, name) == best else 0
    frame.f_locals[name] = best
    if name not in frame.f_code.co_varnames + frame.f_code.co_cellvars + frame.f_code.co_freevars:
        frame.f_globals[name] = best
    elif hasattr(ctypes.pythonapi, "PyFrame_LocalsToFast"):  # before 3.13 `f_locals` is a copy
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return holds(best)


def _with(test: ast.expr, name: str, value: int) -> ast.expr:
    """A condition with a number in place of a counter."""

    class WithNumber(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            counts = isinstance(node, _COUNTERS) and ast.unparse(node) == name
            return _expression(repr(value)) if counts else self.generic_visit(node)

    return WithNumber().visit(_expression(ast.unparse(test)))  # type: ignore[no-any-return]


def _added(frame: FrameType, name: str, before: ast.If) -> int:
    """What is added to a counter between the line that runs and a condition."""
    return sum(
        node.value.value
        for node in ast.walk(_parsed(frame.f_code.co_filename))
        if isinstance(node, ast.AugAssign)
        and frame.f_lineno < node.lineno < before.lineno
        and isinstance(node.op, ast.Add)
        and ast.unparse(node.target) == name
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int)
    )


def _periods(test: ast.expr, frame: FrameType) -> Iterator[int]:
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            period = _computed(node.right, {**frame.f_globals, **frame.f_locals})
            if isinstance(period, int) and period > 1:
                yield period


def _computed(expression: ast.expr, names: dict[str, Any]) -> Any:
    code = compile(ast.Expression(expression), "<condition>", "eval")
    try:
        return eval(code, {"__builtins__": {}}, names)
    except Exception:  # whatever the script's own operands raise
        return None
