"""stdout carries the answer and nothing else."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from memplan.types.errors import UsageError

if TYPE_CHECKING:
    from rich.text import Text

_ASCII = str.maketrans("–│█▲", "-|#^") | {
    dots: " -#"[min((dots - 0x2800).bit_count() + 1, 4) // 2] for dots in range(0x2800, 0x2900)
}
"""What reports are drawn with, for a stream that takes ASCII alone."""


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


def write_report(lines_of: Callable[[int], Iterable[Text]]) -> None:
    """Write the lines of a report for stdout's width, in its colours; in ASCII where it takes no
    more."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    # Captured first: rich ends the process on a broken pipe.
    with console.capture() as capture:
        for line in lines_of(console.width):
            console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)
    text = capture.get()
    if not console.encoding.lower().replace("-", "").startswith("utf"):
        text = text.translate(_ASCII).encode("ascii", "replace").decode()
    write_answer(text)


def write_lines(lines: Iterable[Text]) -> None:
    """Write the lines of a report that are the same for every width."""
    write_report(lambda _width: lines)
