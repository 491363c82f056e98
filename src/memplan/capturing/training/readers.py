"""Knows the readers of data loaders that expect no end: a loader that ran dry would fail them."""

from __future__ import annotations

import ast
import sys
from types import FrameType

from memplan.capturing.known_values.asking import expressions
from memplan.types.installed import is_installed

_CATCHES = ("StopIteration", "Exception", "BaseException")


def expects_no_end() -> bool:
    """Whether the job asks for a batch by `next(iterator)`, and nothing catches StopIteration."""
    asked = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_installed(frame.f_code.co_filename):
            path = expressions(frame.f_code, frame.f_lasti)
            if any(isinstance(node, ast.Try) and _catches(node) for node in path):
                return False
            if not asked and not (path and _is_bare_next(path[-1])):
                return False
            asked = True
        frame = frame.f_back
    return asked


def _is_bare_next(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "next"
        and len(node.args) == 1
    )


def _catches(node: ast.Try) -> bool:
    return any(
        one.type is None or any(name in ast.unparse(one.type) for name in _CATCHES)
        for one in node.handlers
    )
