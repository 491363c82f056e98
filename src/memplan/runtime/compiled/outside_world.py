"""Sees a step ask what no graph can: the time, the system's random numbers, a file, the state of a
random generator, whether a number that stays symbolic is a float."""

from __future__ import annotations

import datetime
import os
import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from memplan.runtime.compiled.lines import is_users_file
from memplan.runtime.compiled.scalars import Symbolic

_CLOCKS = tuple(
    getattr(time, name)
    for name in (
        "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns",
        "process_time", "process_time_ns", "thread_time", "thread_time_ns", "gmtime", "localtime",
        "strftime", "ctime",
    )
)  # fmt: skip
_NOW = ("now", "utcnow", "today")
_MOVES = ("manual_seed", "seed", "set_state", "get_state", "graphsafe_set_state")


class OutsideWorld:
    """Enter it around one step: `note(what, hint)` is called at each such question of the user's
    code. Python's profiler tells of calls; where another one is at work, nothing is seen."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._entered = False

    def __enter__(self) -> None:
        if sys.getprofile() is None:
            self._entered = True
            sys.setprofile(self._called)

    def __exit__(self, *exception: Any) -> None:
        if self._entered:
            sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        users = is_users_file(frame.f_code.co_filename)
        what = _asked(function)
        if what and (users or what in _ANYWHERE):
            self._note(what, "ask outside the step, and pass it as an argument")
        if users and function is isinstance and _has_number(frame):
            self._note(_TYPE, "return the number, and look at its type outside the step")


def _asked(function: Any) -> str:
    """What a built-in function would tell, if it is not the same in each step."""
    if function in _CLOCKS:
        return _TIME
    if function is os.urandom:
        return _SYSTEM
    owner = getattr(function, "__self__", None)
    if isinstance(owner, random.Random):
        return _RANDOM
    if isinstance(owner, torch.Generator) and function.__name__ in _MOVES:
        return _GENERATOR
    if isinstance(owner, type) and issubclass(owner, datetime.date) and function.__name__ in _NOW:
        return _TIME
    if function is open or function is input:
        return _FILE
    return ""


def _has_number(frame: FrameType) -> bool:
    """Whether one of its variables is a number read from a tensor: `isinstance(x, float)` is false
    of such while the step is recorded, and which variable was asked about is not told."""
    return any(isinstance(value, Symbolic) for value in frame.f_locals.values())


_TYPE = "it asks for the type of a number read from a tensor"
_TIME = "it asks for the time"
_SYSTEM = "it draws the system's random numbers"
_RANDOM = "it draws from a generator of Python's random"
_GENERATOR = "it reads or sets the state of a random generator"
_FILE = "it opens a file or reads the console"
_ANYWHERE = (_SYSTEM, _RANDOM)
"""What libraries ask on behalf of the user's code."""
