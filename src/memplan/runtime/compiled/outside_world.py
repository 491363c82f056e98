"""Sees a step ask what no graph can: the time, the system's random numbers, a file, the state of a
random generator, the type of a number that stays symbolic."""

from __future__ import annotations

import datetime
import io
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from memplan.runtime.compiled.code_lines import compares_types
from memplan.runtime.compiled.lines import is_ours, is_users_file
from memplan.runtime.compiled.scalars import Symbolic, scalar_of

_CLOCKS = tuple(
    getattr(time, name)
    for name in (
        "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns",
        "process_time", "process_time_ns", "thread_time", "thread_time_ns", "gmtime", "localtime",
        "strftime", "ctime",
    )
)  # fmt: skip
_NOW = ("now", "utcnow", "today")
_TORCH = str(Path(torch.__file__).parent)
"""It takes symbolic numbers for what they are."""
_OF_FILES = frozenset(
    {
        "read", "read1", "readline", "readlines", "readinto", "write", "writelines", "truncate",
        "seek", "tell", "writerow", "writerows",
    }
)  # fmt: skip
_MOVES = ("manual_seed", "initial_seed", "seed", "set_state", "get_state", "graphsafe_set_state")


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
        if event == "call":
            _given_plain(frame)
        if event != "c_call":
            return
        users = is_users_file(frame.f_code.co_filename)
        what = _asked(function)
        if what == _FILE and not users:
            users = _is_told(frame, function)
        if what and (users or what in _ANYWHERE):
            self._note(what, "ask outside the step, and pass it as an argument")


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
    return _of_owner(owner, function.__name__)


def _of_owner(owner: Any, name: str) -> str:
    home = type(owner).__module__
    if name in _OF_FILES and (isinstance(owner, io.IOBase) or home == "_csv"):
        return _FILE
    if home == "_queue":
        return _QUEUE
    if (home in ("_socket", "socket") and name.startswith(("send", "recv"))) or name == "fork_exec":
        return _ELSEWHERE
    return ""


def _is_told(frame: FrameType, function: Any) -> bool:
    """Whether a library writes something for the user: a bar of progress, a log of its own."""
    home = str(frame.f_globals.get("__name__")).split(".")[0]
    return function.__name__ in ("write", "writelines", "writerow") and home not in _QUIET


_QUIET = ("memplan", "torch", "warnings", "logging", "traceback", "pickle", "tempfile")


def _given_plain(frame: FrameType) -> None:
    """Plain numbers for the arguments of a function that tells types apart: `type(x) is float` is
    false of those that stay symbolic. What a profiler writes into a frame's variables stays."""
    file = frame.f_code.co_filename
    if is_ours(file) or file.startswith(_TORCH) or not compares_types(frame.f_code):
        return
    variables = frame.f_locals
    for name, value in variables.items():
        if isinstance(value, Symbolic) and (scalar := scalar_of(value)) is not None:
            variables[name] = scalar.escape("a number read from a tensor, whose type is asked for")


_TIME = "it asks for the time"
_SYSTEM = "it draws the system's random numbers"
_RANDOM = "it draws from a generator of Python's random"
_GENERATOR = "it reads or sets the state of a random generator"
_FILE = "it reads or writes a file or the console"
_QUEUE = "it uses a queue"
_ELSEWHERE = "it starts a process or talks to one"
_ANYWHERE = (_SYSTEM, _RANDOM, _ELSEWHERE)
"""What libraries ask on behalf of the user's code."""
