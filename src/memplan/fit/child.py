"""Captures in child processes: a process can be captured once only, and cleanly only then."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from memplan.capture.options import ScriptTarget
from memplan.fit.processes import CommandProcess, ended_by
from memplan.types.errors import InternalError
from memplan.types.estimate import Estimate
from memplan.types.plan import Plan
from memplan.types.plan_file import save_plan
from memplan.types.trace import Trace
from memplan.types.trace_file import load_trace

_ANSWERED = (0, 3)
_OUR_FAULT, _NO_ANSWER = 1, 4
"""Exit codes for a capture that died."""


@dataclass(frozen=True)
class Captured:
    """A job as captured, and what was said of it."""

    trace: Trace
    estimate: Estimate


class CaptureFailedError(Exception):
    """A child gave no answer.

    Attributes:
        code: its exit code.
        said: what it wrote to stderr, where the capture was a quiet one; empty where that passed
            through.
    """

    def __init__(self, code: int, said: str = "") -> None:
        super().__init__(said or f"exit code {code}")
        self.code = code
        self.said = said


class CaptureProgram(Protocol):
    """Captures a program, with a plan in effect or without. Raises CaptureFailedError.

    `quiet`: what it writes to stderr is kept back, for it has been seen before.
    """

    def __call__(
        self, program: ScriptTarget, plan: Plan | None = None, *, quiet: bool = False
    ) -> Captured: ...


class ChildCapture:
    """Runs `memplan estimate` on a program, each time in a fresh process.

    A context manager: traces and plans live in a folder of its own, which goes with it. `words`
    puts a program on a command line; with launchers before it they are part of that.
    """

    def __init__(
        self,
        options: list[str],
        words: Callable[[ScriptTarget], list[str]] | None = None,
    ) -> None:
        self._options = options
        self._words = words or program_words
        self._folder = tempfile.TemporaryDirectory(prefix="memplan-fit-")

    def __enter__(self) -> ChildCapture:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._folder.cleanup()

    def __call__(
        self, program: ScriptTarget, plan: Plan | None = None, *, quiet: bool = False
    ) -> Captured:
        folder = Path(self._folder.name)
        trace, planned = folder / "job.trace", folder / "job.plan"
        options = list(self._options)
        if plan is not None:
            save_plan(plan, planned, overwrite=True)
            options += ["--plan", str(planned)]
        words = estimate_words(options, trace, self._words(program))
        with CommandProcess(words, quiet=quiet) as process:
            process.wait()
            estimate = read_estimate(process)
        return Captured(load_trace(trace), estimate)


def estimate_words(options: list[str], trace: Path, program: list[str]) -> list[str]:
    """Our command that captures a program, leaves its trace and answers in JSON."""
    return ["estimate", *options, "-f", "-o", str(trace), "--json", *program]


def read_estimate(process: CommandProcess) -> Estimate:
    """The answer of a capture that has ended. Raises CaptureFailedError where it gave none."""
    code = process.wait()
    if (number := ended_by(code)) is not None:
        why = ", as Linux does where memory runs out" if number is signal.SIGKILL else ""
        said = f"{process.said()}memplan: error: the capture was ended by {number.name}{why}\n"
        raise CaptureFailedError(_NO_ANSWER if why or code > 0 else _OUR_FAULT, said)
    if code not in _ANSWERED:
        raise CaptureFailedError(code, process.said())
    try:
        return msgspec.json.decode(process.answer(), type=Estimate)
    except msgspec.DecodeError as error:
        raise InternalError(f"the capture's answer cannot be read: {error}") from error


def program_words(program: ScriptTarget) -> list[str]:
    """The program as it stands at the end of a command line of ours."""
    return [*(["-m"] if program.kind == "module" else []), program.name, *program.argv]


def last_words(text: str) -> str:
    """What memplan said last on stderr, without the hint that may follow."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("memplan: ")]
    return (own or lines or [""])[-1].removeprefix("memplan: ").removeprefix("error: ")
