"""Keeps the overlay small: beyond a limit, its largest files keep their size, not their bytes."""

from __future__ import annotations

import ctypes
import posix
from collections.abc import Callable

from memplan.capturing.sandbox.changes import disk_bytes
from memplan.types.deadline import Deadline

LIMIT = 512 << 20
"""Bytes of the overlay's files on the disk."""
_LARGE = 1 << 20
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_PERIOD = 1.0


class Budget:
    """Told of each file before it is written; looks at their sizes at most once a second."""

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
