"""The directory that takes what the script writes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import posix
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from memplan.capturing.sandbox.changes import disk_bytes
from memplan.types.deadline import Deadline
from memplan.types.errors import CaptureError

_PREFIX = "memplan-"
_STALE_AFTER = 60.0
_CANDIDATES = ("/tmp", "/var/tmp", "/dev/shm")


def make_scratch() -> str:
    """A new private directory, in `$TMPDIR` or the first other place that can be written.

    Raises CaptureError where none can. The shared memory comes last: DataLoader workers need it.
    """
    tried = [p for p in (os.environ.get("TMPDIR"), *_CANDIDATES) if p and p.startswith("/")]
    for parent in tried:
        try:
            root = os.path.realpath(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            remove_stale(Path(root).parent)
            return root
        except OSError:
            continue
    raise CaptureError(
        f"no directory for temporary files can be written (tried {', '.join(tried)})",
        "set TMPDIR to a directory that can",
    )


def remove_stale(parent: Path) -> None:
    """Delete what processes that were killed left in `parent`."""
    for root in parent.glob(f"{_PREFIX}*"):
        if _is_abandoned(str(root)):
            remove_scratch(str(root))


def _is_abandoned(root: str) -> bool:
    """Whether nobody holds the lock on a journal that is ours and not just being made."""
    try:
        fd = posix.open(f"{root}/journal", posix.O_RDWR | posix.O_CLOEXEC | posix.O_NOFOLLOW)
    except OSError:
        return False
    try:
        status = posix.fstat(fd)
        if status.st_uid != posix.getuid() or time.time() - status.st_mtime < _STALE_AFTER:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        posix.close(fd)
    return True


def remove_scratch(root: str) -> None:
    """Delete the scratch directory and all in it."""
    # A script may have taken its own rights to a directory.
    for directory, children, _ in os.walk(root):
        for name in children:
            path = f"{directory}/{name}"
            with contextlib.suppress(OSError):  # Another process may be deleting it as stale.
                if not stat.S_ISLNK(posix.lstat(path).st_mode):
                    posix.chmod(path, stat.S_IRWXU)
    shutil.rmtree(root, ignore_errors=True)


LIMIT = 512 << 20
"""Bytes of the overlay's files on the disk."""
_LARGE = 1 << 20
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_PERIOD = 1.0


class Budget:
    """Keeps the overlay small: beyond a limit, its largest files keep their size, not their bytes.

    Told of each file before it is written; looks at their sizes at most once a second.
    """

    def __init__(self, on_note: Callable[[str], None], limit: int = LIMIT) -> None:
        self._on_note = on_note
        self._limit = limit
        self._files: dict[str, None] = {}
        self._next_look = Deadline(0)

    def __call__(self, disk: str) -> None:
        self._files[disk] = None
        if self._next_look.passed:
            self._next_look = Deadline(_PERIOD)
            self.enforce()

    def enforce(self) -> None:
        """Empty the largest files until the rest is within the limit."""
        sizes = disk_bytes(list(self._files))
        total = sum(sizes.values())
        for disk, size in sorted(sizes.items(), key=lambda item: -item[1]):
            if total <= self._limit or size < _LARGE:
                return
            if _punch(disk):
                total -= size
                self._on_note(
                    f"the script wrote more than {self._limit >> 20} MiB: the contents of a file "
                    f"of {size >> 20} MiB were dropped (it reads as zeros)"
                )


def _punch(disk: str) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = posix.open(disk, posix.O_RDWR | posix.O_CLOEXEC)
    try:
        length = posix.fstat(fd).st_size
        arguments = (ctypes.c_int(_KEEP_SIZE_PUNCH_HOLE), ctypes.c_int64(0), ctypes.c_int64(length))
        return bool(libc.fallocate64(fd, *arguments) == 0)
    finally:
        posix.close(fd)
