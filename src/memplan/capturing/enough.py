"""The end of the user's script, once nothing new is to be expected of it.

`EnoughSeen` is raised at the next operator. A script may catch it (`except:`, `except
BaseException:`) in a loop that would then never end. So where one is caught, and with it forgotten,
the next line of the script raises another: outside of the handler, and sooner or later outside of
every `try` around the loop.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from memplan.capturing.recording.context import shown_path

_PATIENCE = 8


@dataclass
class _Run:
    """A run of the script."""

    caller: FrameType
    """The frame below its own."""
    raised: int = 0
    """How often it was told to end."""


_running: list[_Run] = []


class EnoughSeen(BaseException):
    """Ends the user's script. Never an `Exception`, so that a script's own `except Exception` does
    not stop it; one that swallows it meets it again at its next line."""

    def __init__(self) -> None:
        super().__init__()
        if _running:
            _running[-1].raised += 1
            if _running[-1].raised > _PATIENCE:  # the script keeps those that it caught
                _end_at_next_line()

    def __del__(self) -> None:
        _end_at_next_line()


@contextmanager
def ended_whatever_it_catches() -> Iterator[None]:
    """A context manager for the script's run, whose threads end, too."""
    tracing = sys.gettrace()
    _running.append(_Run(sys._getframe(2)))
    try:
        yield
    finally:
        _running.pop()
        if sys.gettrace() is not tracing:
            sys.settrace(tracing)


def _end_at_next_line() -> None:
    if not _running:
        return
    frame: FrameType | None = sys._getframe(2)
    sys.settrace(lambda *_event: None)  # not in calls
    while frame is not None and frame is not _running[-1].caller:
        if shown_path(frame.f_code.co_filename):
            frame.f_trace = _raise
        frame = frame.f_back


def _raise(_frame: FrameType, event: str, _arg: Any) -> Any:
    if event == "line":
        raise EnoughSeen  # which ends the tracing too
    return _raise
