"""stdout carries the answer and nothing else; stderr what happens on the way."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from memplan.types.deadline import Deadline
from memplan.types.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

_REFRESH_SECONDS = 0.1


def write_answer(text: str) -> None:
    """Write to stdout at once. A reader that has gone (`| head -1`) is no error: the exit code
    still carries the verdict.

    Raises UsageError where stdout cannot be written, as on a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout once more on exit and would complain there.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise UsageError(
                f"the answer cannot be written: {error.strerror}", "send stdout elsewhere"
            ) from error


def write_json(value: object) -> None:
    """Write a struct or plain data as indented JSON."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    write_answer(text + "\n")


def write_report(render: Callable[[Console], None]) -> None:
    """Let `render` print to a console that has stdout's width, colours and character set."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    # Captured first: rich ends the process on a broken pipe.
    with console.capture() as capture:
        render(console)
    write_answer(capture.get())


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
