"""Writable memory maps of files too large to copy: private, so that the file stays as it is."""

from __future__ import annotations

import mmap
import posix
import stat
from typing import Any

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.sandbox.view import View

_READ_WRITE = posix.O_RDWR


def patch_mmap(patches: Patches, view: View) -> None:
    """Make a shared writable mapping of a file that was opened read-only in its stead
    (`changes.COPY_LIMIT`) a private one: the script sees what it writes, the disk does not."""

    class Mapping(mmap.mmap):
        def __new__(cls, fileno: int, length: int, *args: Any, **kwargs: Any) -> Mapping:
            if kwargs.get("access") == mmap.ACCESS_WRITE and _stands_in(view, fileno):
                kwargs["access"] = mmap.ACCESS_COPY
            return super().__new__(cls, fileno, length, *args, **kwargs)

    Mapping.__name__ = Mapping.__qualname__ = "mmap"
    patches.set(mmap, "mmap", Mapping)


def _stands_in(view: View, fd: int) -> bool:
    if view.closed or fd < 0 or not stat.S_ISREG(posix.fstat(fd).st_mode):
        return False
    flags = _flags(fd)
    path = posix.readlink(f"/proc/self/fd/{fd}")
    return not flags & _READ_WRITE and not path.startswith(view.root)


def _flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)
