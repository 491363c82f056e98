"""Commands of ours in processes of their own, none of which outlives the one that started it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType

_SECONDS_BY_ITSELF = 1.0
"""A signal from a terminal reaches the child too; a second one would disturb its clearing up."""
_SECONDS_TO_END = 20.0
"""What a child that was told to end has for removing what it made."""
_SECONDS_BETWEEN_LOOKS = 0.05
_PARENT = "MEMPLAN_PARENT"
"""Environment variable of a command that another one of ours started: the number of its process."""


class CommandProcess:
    """`python -m memplan WORDS`, running. Leaving the block ends it.

    `quiet`: what it writes to stderr is kept back until `said`.
    """

    def __init__(self, words: Sequence[str], *, quiet: bool = False) -> None:
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self._kept = tempfile.TemporaryFile() if quiet else None  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "memplan", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._kept,
            env=os.environ | {_PARENT: str(os.getpid())},
        )

    def __enter__(self) -> CommandProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._process.poll() is None:
                self._end()
        finally:
            self._out.close()
            if self._kept is not None:
                self._kept.close()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait()

    def answer(self) -> bytes:
        """What it has written to stdout."""
        self._out.seek(0)
        return self._out.read()

    def said(self) -> str:
        """What it has written to stderr; empty where that passed through."""
        if self._kept is None:
            return ""
        self._kept.seek(0)
        return self._kept.read().decode(errors="replace")

    def _end(self) -> None:
        """Terminated, not killed: it has temporary files and workers of its own."""
        for ask, seconds in (
            (None, _SECONDS_BY_ITSELF),
            (self._process.terminate, _SECONDS_TO_END),
        ):
            if ask is not None:
                ask()
            try:
                self._process.wait(timeout=seconds)
                return
            except subprocess.TimeoutExpired:
                continue
        self._process.kill()
        self._process.wait()


@functools.cache
def started_by_us() -> bool:
    """Whether another command of ours started this process; that one says how it ends. To be asked
    before the user's program runs, which shall not find the traces of it."""
    return os.environ.pop(_PARENT, "") == str(os.getppid())


def ended_by(code: int) -> signal.Signals | None:
    """The signal that an exit code tells of, the process's own (143) or the system's (-15)."""
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number)
    except ValueError:
        return None


def wait_for_any(processes: Sequence[CommandProcess]) -> CommandProcess:
    """The first of them that has ended."""
    while True:
        for process in processes:
            if process.ended:
                return process
        time.sleep(_SECONDS_BETWEEN_LOOKS)
