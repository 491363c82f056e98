"""A terminal of its own for what draws in one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from typing import IO


class Terminal:
    """One of 30 lines; `text` is what was written to it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.file: IO[str] = os.fdopen(self.slave, "w", closefd=False)
        self._written = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while part := os.read(self.master, 65536):
                self._written += part
        except OSError:  # the other end is closed
            pass

    @property
    def text(self) -> str:
        """All, once it is complete."""
        os.close(self.slave)
        self._thread.join(10)
        os.close(self.master)
        return self._written.decode()


def plain(text: str) -> str:
    return re.sub(r"\x1b(\[[\d;]*[A-Za-z]|[78])", "", text)
