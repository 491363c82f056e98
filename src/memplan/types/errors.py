"""Errors that users see: what happened and where, what to try, and an exit code for each kind."""

from __future__ import annotations

import traceback


class MemplanError(Exception):
    """Base of every error raised on purpose.

    Attributes:
        message: what happened, and where.
        hint: what to try; empty when nothing useful can be said.
        exit_code: the process exit code of a command that ends with this error.
    """

    exit_code: int = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  try: {self.hint}" if self.hint else self.message


class InternalError(MemplanError):
    """A fault of memplan itself."""

    exit_code = 1


class UsageError(MemplanError):
    """The command line, an option's value or an input file is not usable as given."""

    exit_code = 2


class FormatError(UsageError):
    """A file from outside is truncated, foreign, too large or hostile."""


class NoAnswerError(MemplanError):
    """The question is sound but could not be answered: not capturable, or out of time."""

    exit_code = 4


class CaptureError(NoAnswerError):
    """The script could not be captured."""


class InfeasibleError(MemplanError):
    """What was asked for cannot be had; the message says what can."""

    exit_code = 3


class RecomputeError(MemplanError):
    """What was dropped for backward could not be recomputed as it was."""

    exit_code = 1


class OffloadError(MemplanError):
    """What was sent to the host for backward did not come back as it was."""

    exit_code = 1


class OptimizerInBackwardError(MemplanError):
    """The job used what a weight update in backward had already released or changed."""

    exit_code = 1


class GradViewsError(MemplanError):
    """The job used gradients of DistributedDataParallel as they cannot be used where they are views
    of its buckets."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """The first line of what an error says; of one that says nothing, such as a bare `assert`, the
    line of code that raised it and its place."""
    # PyTorch's compiler adds where the script was.
    said = str(error).partition("from user code:")[0].strip().partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    if frames and (not said or said.endswith(":")):
        return f"`{frames[-1].line}` in {frames[-1].filename}:{frames[-1].lineno}"
    return said or type(error).__name__
