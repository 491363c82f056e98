"""Finds the expression in a program that asks for a device value.

The purpose of a condition decides which answer is likelier. The header of a loop is asked whether
to go on, and the questions of PyTorch's own iterative optimizers have known answers in a healthy
run. The expression is found by the source position of the running instruction.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from opcode import opname
from types import CodeType, FrameType

from memplan.capturing.recording.context import shown_path, syntax_of

_tree = lru_cache(maxsize=16)(syntax_of)
LARGE = 1e30
"""Larger than any threshold with which a loop compares a number."""
_LBFGS = "torch/optim/lbfgs.py"
_LEAVES = (ast.Raise, ast.Continue, ast.Break)
_GREATER, _LESS = (ast.Gt, ast.GtE), (ast.Lt, ast.LtE)
_BYTES_PER_INSTRUCTION = 2


@dataclass(frozen=True)
class Asking:
    """The expression that needs a device value."""

    goes_on: bool | None = None
    """If the expression is in the header of a `while` loop: the truth value of the condition with
    which the loop goes on. Otherwise None."""
    number: float | None = None
    """If a number is compared in such a header: a number with which the loop goes on."""
    ends: float | None = None
    """A number with which that loop ends."""
    holds: bool | None = None
    """If the expression is part of an `assert`, or of an `if` that only raises: the truth value of
    the condition with which nothing is raised. Otherwise None."""
    goes_further: bool | None = None
    """If the expression is part of an `if` without `else`: the truth value of the condition with
    which more is computed. That is the `if`'s body; or, if the body leaves the surrounding code,
    what comes after it. None elsewhere, and where the body returns, as after a first attempt that
    was good enough."""
    turns: bool = False
    """Whether an `if` with an `else` asks, while a `while` loop runs here or in a caller. One side
    may bring the loop no nearer to its end, as a step that a solver takes back."""
    breaks: Asking | None = None
    """How a loop goes on, if the expression is the condition of an `if` with which it breaks."""
    lbfgs: str = ""
    """The comparison if `torch.optim.LBFGS` asks; `value` if it reads a number."""


def asking() -> Asking:
    """The expression that needs the value of the running operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.endswith(_LBFGS):
            path = expressions(frame.f_code, frame.f_lasti)
            compared = next(
                (node for node in reversed(path) if isinstance(node, ast.Compare)), None
            )
            return Asking(lbfgs="value" if compared is None else ast.unparse(compared))
        if shown_path(filename):
            path = expressions(frame.f_code, frame.f_lasti)
            header = _in_header(path)
            turns = _has_else(path) and _in_loop(frame)
            return header or Asking(
                holds=_in_check(path),
                goes_further=_in_choice(path),
                turns=turns,
                breaks=_in_break(path),
            )
        frame = frame.f_back
    return Asking()


def _in_check(path: list[ast.AST]) -> bool | None:
    """The truth value of a condition with which its `assert` passes, or its `if` does not raise."""
    for position, node in enumerate(path[:-1]):
        rest = path[position + 1 :]
        raises = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        if not (isinstance(node, ast.Assert) or raises) or rest[0] is not node.test:  # type: ignore[attr-defined]
            continue
        if all(isinstance(inner, (ast.UnaryOp, ast.BoolOp)) for inner in rest[:-1]):
            return _negated(rest) == raises
    return None


def _in_choice(path: list[ast.AST]) -> bool | None:
    """The truth value of a condition with which more is computed."""
    for node, *rest in (path[position:] for position in range(len(path) - 1)):
        if not isinstance(node, ast.If) or node.orelse or rest[0] is not node.test:
            continue
        if isinstance(node.body[-1], ast.Return):
            return None
        if all(isinstance(inner, (ast.UnaryOp, ast.BoolOp)) for inner in rest[:-1]):
            return _negated(rest) == isinstance(node.body[-1], _LEAVES)
    return None


def _has_else(path: list[ast.AST]) -> bool:
    return any(
        isinstance(node, ast.If) and node.orelse and child is node.test
        for node, child in pairwise(path)
    )


def _in_loop(frame: FrameType | None) -> bool:
    """Whether this function, or one that called it, is in the body of a `while` loop."""
    while frame is not None:
        if shown_path(frame.f_code.co_filename):
            for node, child in pairwise(expressions(frame.f_code, frame.f_lasti)):
                if isinstance(node, ast.While) and child is not node.test:
                    return True
        frame = frame.f_back
    return False


def _negated(path: list[ast.AST]) -> bool:
    """Whether the last of these conditions is negated inside the first one."""
    nots = sum(isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Not) for n in path[:-1])
    return nots % 2 == 1


def _in_header(path: list[ast.AST]) -> Asking | None:
    inside = [i for i, node in enumerate(path) if isinstance(node, ast.While)]
    if not inside or inside[-1] + 1 == len(path):
        return None
    loop, rest = path[inside[-1]], path[inside[-1] + 1 :]
    assert isinstance(loop, ast.While)
    if rest[0] is not loop.test:
        return None
    return _goes_on(rest, not _negated(rest))


def _in_break(path: list[ast.AST]) -> Asking | None:
    inside = [i for i, node in enumerate(path) if isinstance(node, ast.If | ast.For | ast.While)]
    if len(inside) < 2 or inside[-1] + 1 == len(path):
        return None
    around, (node, *rest) = path[inside[-2]], path[inside[-1] :]
    if not isinstance(node, ast.If) or isinstance(around, ast.If) or around.orelse or node.orelse:  # type: ignore[attr-defined]
        return None
    if rest[0] is not node.test or not isinstance(node.body[-1], ast.Break):
        return None
    return _goes_on(rest, _negated(rest))


def _goes_on(rest: list[ast.AST], goes_on: bool) -> Asking:
    """With what a loop goes on whose condition has these nodes, outermost first."""
    asker = rest[-1]
    for node, child in pairwise(rest):
        if isinstance(node, ast.Compare):
            large = _goes_on_if_large(node, child)
            if large is None:
                return Asking(goes_on)
            other = -LARGE if child is asker else 0.0
            more, less = (LARGE, other) if large == goes_on else (other, LARGE)
            return Asking(goes_on, more, less)
    return Asking(goes_on)


def _goes_on_if_large(node: ast.Compare, child: ast.AST) -> bool | None:
    """Whether a comparison holds when `child`, one of its sides, is large."""
    if len(node.ops) != 1 or not isinstance(node.ops[0], (*_GREATER, *_LESS)):
        return None
    return isinstance(node.ops[0], _GREATER) == (child is node.left)


@lru_cache(maxsize=4096)
def expressions(code: CodeType, instruction: int) -> list[ast.AST]:
    """The syntax nodes that contain an instruction, outermost first; empty without source."""
    number = instruction // _BYTES_PER_INSTRUCTION
    running = opname[code.co_code[instruction]]
    if "JUMP" in running or running == "TO_BOOL":
        # The position of a test is unreliable; that of what computed the tested value is not.
        number -= 1
    return _around(code, number)


def _around(code: CodeType, number: int) -> list[ast.AST]:
    positions = islice(code.co_positions(), max(number, 0), None)
    line, end_line, column, end_column = next(positions, (None, None, None, None))
    if line is None or end_line is None or column is None or end_column is None:
        return []
    first, last = (line, column), (end_line, end_column)
    path: list[ast.AST] = []
    node: ast.AST | None = _tree(code.co_filename)
    while node is not None:
        path.append(node)
        node = next((c for c in ast.iter_child_nodes(node) if _covers(c, first, last)), None)
    return path


def _covers(node: ast.AST, first: tuple[int, int], last: tuple[int, int]) -> bool:
    line, end_line = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    if line is None or end_line is None:
        return False
    begin, end = (line, node.col_offset), (end_line, node.end_col_offset)  # type: ignore[attr-defined]
    return begin <= first and last <= end
