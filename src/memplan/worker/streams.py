"""What goes to stderr while a script runs: all that it prints, and how far the work has come."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from memplan.types.deadline import Deadline

_REFRESH_SECONDS = 0.1


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send everything printed meanwhile to stderr: by this process, by its children and by C code
    alike, hence the file descriptors."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def _stage_lines(stream: TextIO) -> Callable[[str], None]:
    last = ""

    def show(text: str) -> None:
        nonlocal last
        if text != last:
            last = text
            stream.write(f"memplan: {text}\n")
            stream.flush()

    return show


@contextlib.contextmanager
def progress_line(*, stages: bool = False) -> Iterator[Callable[[str], None]]:
    """A line on stderr that is written over and wiped at the end. Where stderr is no terminal it is
    silent, or with `stages` writes a line for each text that is not the one before.

    Deliberately without a refreshing thread: the program that runs meanwhile forks workers, and a
    child must not inherit a terminal lock that nobody will ever release.
    """
    stream = sys.stderr
    if not stream.isatty():
        yield _stage_lines(stream) if stages else lambda text: None
        return
    next_line = Deadline(0)

    def show(text: str) -> None:
        nonlocal next_line
        if next_line.passed:
            next_line = Deadline(_REFRESH_SECONDS)
            room = shutil.get_terminal_size().columns - 1
            stream.write(f"\r\x1b[2K{text[:room]}")
            stream.flush()

    try:
        yield show
    finally:
        stream.write("\r\x1b[2K")
        stream.flush()
