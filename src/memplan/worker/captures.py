"""Captures of a job with what was asked of it changed: other arguments of the script, a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from memplan.capturing.options import ScriptTarget
from memplan.types.estimate import Estimate
from memplan.types.plan import Plan
from memplan.types.trace import Trace
from memplan.worker.pool import Workers
from memplan.worker.request import Question


@dataclass(frozen=True)
class Captured:
    """A job as captured, and what was said of it."""

    trace: Trace
    estimate: Estimate


class CaptureProgram(Protocol):
    """Captures a program, with a plan in effect or without. Raises CaptureFailedError.

    `quiet`: what it writes to stderr is kept back, for it has been seen before.
    """

    def __call__(
        self, program: ScriptTarget, plan: Plan | None = None, *, quiet: bool = False
    ) -> Captured: ...


@dataclass(frozen=True)
class RankCapture:
    """A `CaptureProgram` of one rank, each time in a fresh process: one can be captured once only,
    and cleanly only then."""

    question: Question

    def __call__(
        self, program: ScriptTarget, plan: Plan | None = None, *, quiet: bool = False
    ) -> Captured:
        asked = self.question.about(program, plan)
        with Workers() as workers:
            trace = workers.start(asked.request, quiet=quiet).trace()
        return Captured(trace, asked.answer(trace))
