"""The processes below this one: what a script starts, and what that starts, ends with the capture.

A process whose parent has ended belongs to the nearest ancestor that adopts (`prctl(2)`,
`PR_SET_CHILD_SUBREAPER`), so that none of them gets away. On systems without `/proc` nothing is
found, and nothing is ended here.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import posix
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

_SET_ADOPTS, _GET_ADOPTS = 36, 37
_PARENT, _STARTED = 1, 19
"""Fields of `/proc/PID/stat` after the name, from the state on."""
_ROUNDS = 5


class Descendants:
    """Descendants of this process started from now on, not by processes that exist already."""

    def __init__(self) -> None:
        self._before = _below(posix.getpid(), {})

    def end(self) -> None:
        """Kill them, and take note of their end."""
        for _ in range(_ROUNDS):  # one may start another meanwhile
            left = _below(posix.getpid(), self._before).keys() - _tracker()
            if not left:
                return
            for pid in left:
                _kill(pid)


@contextmanager
def adopting() -> Iterator[None]:
    """A context manager in which orphans below this process become its children."""
    before = _adopts()
    if before is None:
        yield
        return
    _prctl(_SET_ADOPTS, 1)
    try:
        yield
    finally:
        _prctl(_SET_ADOPTS, before)


def _tracker() -> set[int]:
    """Processes of `multiprocessing` itself, which serve this one to its end."""
    pid: int | None = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return set() if pid is None else {pid}


def _kill(pid: int) -> None:
    known = next((child for child in multiprocessing.active_children() if child.pid == pid), None)
    try:
        posix.kill(pid, signal.SIGKILL)
        if known is not None:
            known.join()
        else:
            posix.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # a grandchild, which is adopted and met again in the next round; or it has ended


def _below(root: int, aside: dict[int, int]) -> dict[int, int]:
    """The processes below `root`, with their start times in clock ticks; without those `aside` and
    what is below them."""
    parents: dict[int, list[tuple[int, int]]] = {}
    for pid in _processes():
        fields = _stat(pid)
        if fields is not None:
            parents.setdefault(int(fields[_PARENT]), []).append((pid, int(fields[_STARTED])))
    found: dict[int, int] = {}
    stack = [root]
    while stack:
        for pid, started in parents.get(stack.pop(), ()):
            if pid not in found and aside.get(pid) != started:
                found[pid] = started
                stack.append(pid)
    return found


def _processes() -> list[int]:
    try:
        return [int(name) for name in posix.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []


def _stat(pid: int) -> list[bytes] | None:
    try:
        file = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return None
    try:
        return posix.read(file, 4096).rpartition(b")")[2].split()
    except OSError:
        return None  # it ended in between
    finally:
        posix.close(file)


def _adopts() -> int | None:
    """Whether this process adopts; None where there is no such thing."""
    if sys.platform != "linux":
        return None
    value = ctypes.c_int(0)
    return value.value if _prctl(_GET_ADOPTS, ctypes.byref(value)) == 0 else None


def _prctl(option: int, value: object) -> int:
    return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0))
