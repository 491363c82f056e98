"""stdout carries the answer and nothing else."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from memplan.types.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


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


def write_lines(lines: Iterable[Text]) -> None:
    """Write a report's lines; in ASCII where stdout takes no more."""
    from memplan.report.text import in_ascii

    def render(console: Console) -> None:
        ascii_only = not console.encoding.lower().replace("-", "").startswith("utf")
        for line in lines:
            console.print(
                in_ascii(line) if ascii_only else line,
                no_wrap=True,
                overflow="ignore",
                crop=False,
                highlight=False,
            )

    write_report(render)
