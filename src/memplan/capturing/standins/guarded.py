"""Whether a running import is one that the program can do without.

A job that only probes for a package (`try: import flash_attn` … `except ImportError`) has a path
without it, and which one the job takes elsewhere is not known: it sees what is installed here. An
import whose failure would end the program says that the package is there where the job runs.
"""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from importlib import util
from types import FrameType

from memplan.capturing.recording.context import syntax_of

_MEMPLAN = __name__.partition(".")[0] + "."
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError"})
_CATCH_IMPORT_ERRORS = _IMPORT_ERRORS | {"Exception", "BaseException"}
_EXITS = frozenset({"exit", "quit", "_exit", "abort"})


def importing_frame() -> tuple[FrameType | None, bool]:
    """The frame outside the import system that asks for a module, and whether it only asks for
    its specification (`importlib.util.find_spec`)."""
    frame: FrameType | None = sys._getframe(1)
    probe = False
    while frame is not None and (_of_imports(frame) or _ours(frame)):
        probe = probe or (frame.f_code is util.find_spec.__code__ and not _asked_by_import(frame))
        frame = frame.f_back
    return frame, probe


def _asked_by_import(frame: FrameType) -> bool:
    """memplan's own watcher asks so on behalf of an import."""
    return frame.f_back is not None and _ours(frame.f_back)


def is_guarded(frame: FrameType | None) -> bool:
    """Whether the program goes on when the import that runs in `frame` fails.

    Looks at the statement, at those that import the module that it is in, and further up at
    handlers that name ImportError.
    """
    direct = True
    while frame is not None and not _ours(frame):
        names = _CATCH_IMPORT_ERRORS if direct else _IMPORT_ERRORS
        if not _of_imports(frame) and _caught(frame, names):
            return True
        above = frame.f_back
        imported = above is not None and _of_imports(above)
        if not _of_imports(frame):
            direct = direct and frame.f_code.co_name == "<module>" and imported
        frame = above
    return False


def _of_imports(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith("<frozen importlib") or name.endswith(
        ("/importlib/__init__.py", "/importlib/util.py")
    )


def _ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_MEMPLAN)


def _caught(frame: FrameType, names: frozenset[str]) -> bool:
    if not frame.f_code.co_exceptiontable:
        return False
    line = frame.f_lineno
    return any(
        start <= line <= stop and caught & names
        for start, stop, caught in _handlers(frame.f_code.co_filename)
    )


@lru_cache(maxsize=4096)
def _handlers(filename: str) -> tuple[tuple[int, int, frozenset[str]], ...]:
    """First and last line of each guarded body of a file, and the names of what is caught there."""
    found = []
    for node in ast.walk(syntax_of(filename)):
        if isinstance(node, ast.Try) and node.body:
            caught = frozenset(
                name
                for handler in node.handlers
                if not _ends_program(handler.body[-1])
                for name in _names(handler.type)
            )
            found.append((node.body[0].lineno, node.body[-1].end_lineno or 0, caught))
        elif isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items]
            caught = frozenset(
                name
                for call in calls
                if isinstance(call, ast.Call) and _last_name(call.func) == "suppress"
                for argument in call.args
                for name in _names(argument)
            )
            found.append((node.lineno, node.end_lineno or 0, caught))
    return tuple(item for item in found if item[2])


def _ends_program(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        return True
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Call) and _last_name(value.func) in _EXITS


def _names(caught: ast.expr | None) -> list[str]:
    if caught is None:
        return ["BaseException"]
    if isinstance(caught, ast.Tuple):
        return [_last_name(item) for item in caught.elts]
    return [_last_name(caught)]


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
