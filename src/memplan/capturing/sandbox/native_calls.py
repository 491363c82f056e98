"""Native libraries see the view, too: what they do with files goes through `os` as it stands.

`native/sandbox/file_calls.cpp` takes their calls of the C library's functions. A directory that has
entries on the disk and in the overlay is listed to them as it is on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from memplan import _native
from memplan.capturing.sandbox.view import View


class _Answers:
    def __init__(self, view: View) -> None:
        self._view = view

    def found(self, path: bytes, follow: bool) -> bytes:
        """Where the file that `path` leads to is on the disk."""
        return os.fsencode(self._view.reading(os.fsdecode(path), follow))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def take(view: View) -> Callable[[], None]:
    """Take the calls of every library, also of those that are loaded later, until what is returned
    is called. To be called once the functions of `os` are the stand-ins."""
    _native.take_file_calls(_Answers(view), view.upper)
    return _native.give_back_file_calls
