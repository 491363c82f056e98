"""What went wrong, as a person is told of it."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from memplan.capturing.patches.internals import refusal
from memplan.types.errors import MemplanError, NoAnswerError
from memplan.worker.request import Outcome


class CaptureFailedError(Exception):
    """A process that captured gave no trace.

    Attributes:
        outcome: why.
        wrote: what it wrote to stderr, where that was kept back.
    """

    def __init__(self, outcome: Outcome, wrote: str = "") -> None:
        super().__init__(outcome.message)
        self.outcome = outcome
        self.wrote = wrote


def outcome_of(error: Exception) -> Outcome:
    if isinstance(error, CaptureFailedError):
        return error.outcome
    known = error if isinstance(error, MemplanError) else refusal(error)
    if known is not None:
        memory = isinstance(known.__cause__, MemoryError)
        no_answer = isinstance(known, NoAnswerError)
        return Outcome(
            kind="out_of_memory" if memory else "not_captured" if no_answer else "error",
            exit_code=known.exit_code,
            message=f"error: {_encodable(known.message)}",
            hint=_encodable(known.hint),
        )
    if isinstance(error, MemoryError):
        return Outcome(
            kind="out_of_memory",
            exit_code=NoAnswerError.exit_code,
            message="error: this machine's memory is not enough for it",
            hint="a machine with more RAM, or a recording of fewer steps",
        )
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if "memplan" in frame.filename][-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    return Outcome(
        kind="error",
        exit_code=1,
        message=f"a fault of memplan itself: {type(error).__name__}: {error} (at {place})",
        hint="MEMPLAN_DEBUG=1 in the environment shows the traceback; please report it",
    )


def _encodable(text: str) -> str:
    """Names of files may have bytes that are no text, and JSON takes no such."""
    return text.encode(errors="backslashreplace").decode()


def was_interrupted(error: Exception) -> bool:
    """Whether it stands for Ctrl-C, which came while native code ran that raised its own error
    then, such as the import of a module."""
    found: BaseException | None = None if isinstance(error, MemplanError) else error
    while found is not None and not isinstance(found, KeyboardInterrupt):
        found = found.__cause__ or found.__context__
    return found is not None


def complaint(message: str, hint: str = "") -> str:
    """The lines that a person reads on stderr."""
    return f"memplan: {message}\n" + (f"  try: {hint}\n" if hint else "")


def show_traceback() -> None:
    """Print the traceback of the current error if MEMPLAN_DEBUG asks for it."""
    if os.environ.get("MEMPLAN_DEBUG") == "1":
        traceback.print_exc(file=sys.stderr)
