"""Which line of the user's code is running."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from memplan.runtime.installed import PACKAGES, is_installed

_OURS = str(Path(__file__).parents[2])


@functools.cache
def is_users_file(file: str) -> bool:
    """Whether code of that file is neither a library's nor memplan's."""
    return not file.startswith(_OURS) and not is_installed(file)


def is_ours(file: str) -> bool:
    """Whether it is memplan's."""
    return file.startswith(_OURS)


def user_line() -> str:
    """`file:line` of the innermost frame of the user's code; empty where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def refused_at() -> str:
    """`file:line` of the user's code, and of the library's within it that it is about."""
    frame = sys._getframe(1)
    within = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_file(file):
            return f"{file}:{frame.f_lineno}{within}"
        if not within and (name := _within_package(file)):
            within = f" (in {name}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@functools.cache
def _within_package(file: str) -> str:
    """A library's file from its package's name on; empty for memplan's, Python's and those of torch
    that stand between an operator and whoever calls it."""
    parts = Path(file).parts
    folder = max((place for place, part in enumerate(parts) if part in PACKAGES), default=None)
    if folder is None or is_ours(file):
        return ""
    inner = parts[folder + 1 :]
    return "" if inner[0] == "torch" and inner[1] not in _CALLS_OPERATORS else "/".join(inner)


_CALLS_OPERATORS = {"nn", "optim", "distributions", "amp"}
