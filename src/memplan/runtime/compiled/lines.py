"""Which line of the user's code is running."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from memplan.runtime.installed import is_installed

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
