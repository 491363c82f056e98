"""Conditions like `step % 500 == 0` in functions that a training loop calls.

The loop of a job gives its step to `maybe_evaluate(step)`, `logger.log(step)` or the callbacks of a
list, which decide themselves, or an object counts its calls. So files of the job are compiled with
`remainder(step, 500, 0)` in place of `step % 500` where that is compared. A condition whose number
rises from step to step counts them; once enough steps were seen, it holds for once.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.recording.context import shown_path
from memplan.capturing.training.syntax import expression

REMAINDER = "__memplan_remainder__"
"""The name of `remainder` in the job's modules."""
_OPERANDS = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.UnaryOp),
    *(ast.operator, ast.unaryop, ast.expr_context),
)
_ENOUGH = 2
"""What held behind so many steps need not hold again: all states are there."""


@dataclass
class _Condition:
    number: int = -1
    """The last that was divided."""
    step: int = -1
    steps: int = 0
    """In how many steps it was asked for."""
    rises: bool = True
    held: int = -1
    """The last step behind which it held."""
    came: bool = False
    """Whether it was brought forward."""


class Periods:
    """The conditions of a job that count its steps."""

    def __init__(self, step: Callable[[], int]) -> None:
        """`step`: the number of the step that runs."""
        self._step = step
        self._conditions: dict[str, _Condition] = {}
        self.due = False
        """Whether conditions are to hold that have not."""

    def install(self, patches: Patches) -> None:
        """Be asked for the job's conditions, until `patches.undo()`."""
        patches.set(sys.modules[__name__], "_current", self)

    def holds(self, text: str, number: int, *, held: bool) -> bool:
        """Whether a condition on this number holds, or is to."""
        one = self._conditions.setdefault(text, _Condition())
        step = self._step()
        again = number == one.number and step == one.step
        if not one.rises or (number <= one.number and not again):
            one.rises = False
            return held
        one.steps += step != one.step
        one.number, one.step = number, step
        if held:
            one.held = step
        elif self.due and one.held < _ENOUGH <= one.steps and (again or not one.came):
            one.came = True
            return True
        return held

    def unseen(self) -> list[str]:
        """Those that never held since the states were there."""
        return [
            text
            for text, one in self._conditions.items()
            if one.rises and not one.came and one.held < _ENOUGH <= one.steps
        ]


_current: Periods | None = None


def remainder(number: Any, period: Any, expected: Any, text: str) -> Any:
    """`number % period`, which a condition, in words `text`, compares with what is expected."""
    result = number % period
    if torch.compiler.is_compiling() or _current is None:
        return result
    if not type(number) is type(period) is type(expected) is int:
        return result
    held = _current.holds(text, number, held=result == expected)
    return expected if held else result


def with_remainders(tree: ast.Module, path: str) -> bool:
    """Let a module ask `remainder` in its conditions. Returns whether it has any."""
    compares = _Compares(path)
    compares.visit(tree)
    return compares.found


class _Compares(ast.NodeTransformer):
    def __init__(self, path: str) -> None:
        self._path = path
        self.found = False

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq | ast.NotEq):
            node.left = self._asked(node.left, node.comparators[0], node)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not):
            node.operand = self._asked(node.operand, expression("0", node), node)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        node.test = self._asked(node.test, expression("0", node), node.test)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        # Numba compiles bytecode, and knows no function of ours.
        jitted = any("jit" in ast.unparse(one) for one in node.decorator_list)
        return node if jitted else self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return node  # of data, and perhaps many

    def _asked(self, divided: ast.expr, expected: ast.expr, place: ast.expr) -> ast.expr:
        if not isinstance(divided, ast.BinOp) or not isinstance(divided.op, ast.Mod):
            return divided
        operands = *ast.walk(divided), *ast.walk(expected)
        if isinstance(divided.left, ast.Constant) or not all(
            isinstance(one, _OPERANDS) for one in operands
        ):
            return divided
        self.found = True
        text = f"{ast.unparse(place)} ({shown_path(self._path)}:{place.lineno})"
        call = expression(f"{REMAINDER}(0, 0, 0, {text!r})", divided)
        call.args[:3] = divided.left, divided.right, expected
        return call  # type: ignore[no-any-return]
