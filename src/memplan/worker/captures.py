"""Captures of a job with what was asked of it changed: other arguments of the script, a plan."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

from memplan.capturing.options import ScriptTarget
from memplan.types.estimate import Estimate
from memplan.types.plan import Plan
from memplan.types.trace import Trace
from memplan.worker.pool import Workers
from memplan.worker.process import WorkerProcess
from memplan.worker.request import Question


@dataclass(frozen=True)
class Captured:
    """A job as captured, and what was said of it."""

    trace: Trace
    estimate: Estimate


class NotYetError(Exception):
    """A capture that was asked for ahead has not ended, or not begun."""


class CaptureProgram(Protocol):
    """Captures a program, with a plan in effect or without. Raises CaptureFailedError.

    `quiet`: what it writes to stderr is kept back, for it has been seen before. `steps`: of the
    optimizer, where as many as usual are not enough.
    """

    def __call__(
        self,
        program: ScriptTarget,
        plan: Plan | None = None,
        *,
        quiet: bool = False,
        steps: int | None = None,
    ) -> Captured: ...


@dataclass(frozen=True)
class RankCapture:
    """Captures of one rank, each in a fresh process: one can be captured once only, and cleanly
    only then. Those that `workers`, which has been entered, made before are not made again."""

    question: Question
    workers: Workers | None = None
    goes_on: bool = False
    """Whether more is asked after a capture that does not fit: processes get ready for it."""

    def __call__(
        self,
        program: ScriptTarget,
        plan: Plan | None = None,
        *,
        quiet: bool = False,
        steps: int | None = None,
    ) -> Captured:
        asked = self.question.about(program, plan, steps)
        with Workers() if self.workers is None else nullcontext(self.workers) as workers:
            return self._captured(asked, workers.ended(asked.request, quiet=quiet), workers)

    def ahead(
        self,
        program: ScriptTarget,
        plan: Plan | None = None,
        *,
        quiet: bool = True,
        steps: int | None = None,
    ) -> Captured:
        """What is known already. Raises NotYetError where nothing is: it begins when there is room
        beside what is waited for."""
        assert self.workers is not None
        asked = self.question.about(program, plan, steps)
        process = self.workers.ahead(asked.request)
        if process is None:
            raise NotYetError
        return self._captured(asked, process, self.workers)

    def _captured(self, asked: Question, ended: WorkerProcess, workers: Workers) -> Captured:
        trace = ended.trace()
        estimate = asked.answer(trace)
        workers.seen(estimate.capture_peak_bytes)
        if self.goes_on and not estimate.fits:
            workers.get_ready()
        return Captured(trace, estimate)
