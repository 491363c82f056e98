"""Handlers of out-of-memory errors in the script: no capture reaches them, and a note says so."""

from __future__ import annotations

import ast
import importlib.util

from memplan.capturing.options import ScriptTarget
from memplan.capturing.recording.context import syntax_of

_ERROR = "OutOfMemoryError"
_MESSAGE = "out of memory"
_RETRIES = frozenset({"find_executable_batch_size", "auto_find_batch_size"})
"""Functions of Accelerate and the Hugging Face Trainer that train again with smaller batches."""


def oom_note(target: ScriptTarget) -> list[str]:
    """One sentence when the program's own file handles running out of memory, or one of its
    arguments asks a library to, else none."""
    filename = _filename(target)
    asked = [word for word in target.argv if _asks(word)]
    if asked:
        return [_said(asked[0])]
    lines = sorted(node.lineno for node in ast.walk(syntax_of(filename)) if _waits(node))  # type: ignore[attr-defined]
    if not lines:
        return []
    return [_said(f"{filename}:{lines[0]}")]


def _said(where: str) -> str:
    return (
        f"{where}: what the script does when memory runs out was not exercised: it was captured as "
        "if the card were large enough"
    )


def _asks(word: str) -> bool:
    """Whether an argument switches such a thing on: `--auto_find_batch_size`, also with `=true`."""
    name, _, value = word.partition("=")
    return name.lstrip("-").replace("-", "_") in _RETRIES and value.lower() not in ("false", "0")


def _filename(target: ScriptTarget) -> str:
    if target.kind == "script":
        return target.name
    try:
        spec = importlib.util.find_spec(target.name)
    except (ImportError, ValueError):
        return ""
    return (spec.origin or "") if spec is not None else ""


def _waits(node: ast.AST) -> bool:
    match node:
        case ast.ExceptHandler(type=ast.expr() as kind):
            return _ERROR in ast.unparse(kind)
        case ast.Compare(left=ast.Constant(value=str() as text)):
            return _MESSAGE in text.lower()
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in _RETRIES
        case ast.keyword(arg=str() as name, value=ast.Constant(value=True)):
            return name in _RETRIES
    return False
