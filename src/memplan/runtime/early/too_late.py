"""The error of a job that needs what an early update has taken, and the line that needs it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from memplan.types.errors import EarlyUpdateError

_OURS = str(Path(__file__).parents[2])
_TORCHS = str(Path(torch.__file__).parent)
_NOT_THE_JOBS = (_OURS, _TORCHS, "<")


def too_late(what: str) -> EarlyUpdateError:
    """The error for a job that needs what is gone; `what` it does, as a sentence without an end."""
    return EarlyUpdateError(
        f"{what}, and the plan has already updated the parameter in the backward pass: going on "
        "would change the job's numbers",
        'run without the plan, or delete its part "order": the job does in a later step what it '
        "did not do in its first",
    )


def where() -> str:
    """` (train.py:12)`: the line of the job that is running; empty in the backward pass."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_JOBS):
            return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
