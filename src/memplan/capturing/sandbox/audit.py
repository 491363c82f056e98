"""The tripwire: what gets past the stand-ins is refused before it reaches the disk or the network.

Python raises an audit event before every file and socket operation of its own C code, whichever way
it was called. A hook cannot be removed once added, so one is added for the life of the process and
does nothing while no sandbox is active.
"""

from __future__ import annotations

import errno
import os
import posix
import posixpath
import sys
from collections.abc import Callable
from typing import Any

from memplan.capturing.sandbox import changes
from memplan.capturing.sandbox.files import trust
from memplan.capturing.sandbox.view import View

Check = Callable[[tuple[Any, ...]], None]

_active: dict[str, Check] = {}
_added = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    check = _active.get(event)
    if check is not None:
        check(args)


def arm(checks: dict[str, Check]) -> None:
    """Call `checks[event](arguments)` before each such event, until `disarm`."""
    global _added
    _active.update(checks)
    if not _added:
        sys.addaudithook(_hook)
        _added = True


def disarm() -> None:
    """Let everything through again."""
    _active.clear()


def file_checks(view: View, on_note: Callable[[str], None]) -> dict[str, Check]:
    """Checks that raise PermissionError for a change outside the overlay and the real places."""

    def guard(path: Any, dir_fd: int = -1) -> None:
        if isinstance(path, int) or path is None:
            return
        text = os.fsdecode(path)
        if text.startswith(view.root):
            return
        base = view.cwd if dir_fd < 0 else posix.readlink(f"/proc/self/fd/{dir_fd}")
        full = posixpath.normpath(posixpath.join(base, text))
        if view.is_real(full):
            return
        on_note(f"refused a write past the overlay: {full}")
        raise PermissionError(errno.EACCES, "refused by memplan's sandbox", text)

    def opened(args: tuple[Any, ...]) -> None:
        path, _mode, flags = args
        if changes.is_write(flags) and not getattr(trust, "on", False):
            guard(path)

    def first(args: tuple[Any, ...]) -> None:
        guard(args[0])

    def second(args: tuple[Any, ...]) -> None:
        guard(args[1])

    def both(args: tuple[Any, ...]) -> None:
        guard(args[0], args[2])
        guard(args[1], args[3])

    def database(args: tuple[Any, ...]) -> None:
        text = os.fsdecode(args[0]) if not isinstance(args[0], int) else ""
        if text not in ("", ":memory:") and not text.startswith("file:"):
            guard(text)

    checks: dict[str, Check] = {"open": opened, "sqlite3.connect": database}
    at_last = {"os.mkdir": 2, "os.remove": 1, "os.rmdir": 1, "os.chmod": 2, "os.chown": 3}
    for event, place in at_last.items():
        checks[event] = lambda args, place=place: guard(args[0], args[place])  # type: ignore[misc]
    checks["os.rename"] = both
    for event in ("os.link", "os.symlink"):
        checks[event] = second
    for event in ("os.truncate", "os.utime", "os.setxattr", "os.removexattr"):
        checks[event] = first
    return checks
