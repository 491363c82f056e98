"""What every process of a sandbox must know about the overlay: a growing log and a change mark.

Forked workers write through the same overlay as their parent, so the facts a lookup needs (which
directories have entries in the overlay, which paths are deleted) are kept in a file that all of
them append to. Facts are only ever added, so the order in which processes learn them is immaterial.
The mark is eight shared bytes that change with every record: one comparison tells a reader that it
is up to date.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import posix
from collections.abc import Iterator
from typing import Literal, cast

TOUCHED: Literal["T"] = "T"
"""A directory may have entries in the overlay, or hidden ones."""
HIDDEN: Literal["H"] = "H"
"""The entry of this name on the disk (and all below it) is no longer seen."""
SHADOWED: Literal["S"] = "S"
"""An existing file on the disk was replaced by one in the overlay."""
LINKS: Literal["L"] = "L"
"""A symbolic link or a directory moved, came or went: resolved paths are stale."""
REFUSED: Literal["N"] = "N"
"""A network address that was refused."""
DEVICE: Literal["D"] = "D"
"""A process other than the script's own used CUDA: `file:line`, a line break, the function."""

Kind = Literal["T", "H", "S", "L", "N", "D"]

_MARK_BYTES = 8


class Journal:
    """The shared log in `root`, created there when `create` is set."""

    def __init__(self, root: str, create: bool) -> None:
        flags = posix.O_RDWR | posix.O_CLOEXEC | (posix.O_CREAT if create else 0)
        self._log = posix.open(f"{root}/journal", flags | posix.O_APPEND, 0o600)
        if create:
            # Held as long as a process of the sandbox lives: see scratch.py.
            fcntl.flock(self._log, fcntl.LOCK_EX)
        mark = posix.open(f"{root}/mark", flags, 0o600)
        try:
            if create:
                posix.ftruncate(mark, _MARK_BYTES)
            self.mark = mmap.mmap(mark, _MARK_BYTES)
        finally:
            posix.close(mark)
        self._offset = 0
        self._partial = b""

    def append(self, records: list[tuple[Kind, str]]) -> None:
        """Add records in one atomic write, and change the mark."""
        data = b"".join(kind.encode() + os.fsencode(text) + b"\0" for kind, text in records)
        posix.write(self._log, data)
        self.mark[:_MARK_BYTES] = posix.urandom(_MARK_BYTES)

    def news(self) -> Iterator[tuple[Kind, str]]:
        """Records not yet seen by this process, its own included."""
        while chunk := posix.pread(self._log, 1 << 16, self._offset):
            self._offset += len(chunk)
            *whole, self._partial = (self._partial + chunk).split(b"\0")
            for record in whole:
                yield cast(Kind, chr(record[0])), os.fsdecode(record[1:])

    def close(self) -> None:
        """Release the descriptor and the mapping."""
        posix.close(self._log)
        self.mark.close()
