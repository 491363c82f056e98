"""Captures in child processes: a process can be captured once only, and cleanly only then."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from memplan.capture.options import ScriptTarget
from memplan.types.errors import InternalError
from memplan.types.estimate import Estimate
from memplan.types.plan import Plan
from memplan.types.plan_file import save_plan
from memplan.types.trace import Trace
from memplan.types.trace_file import load_trace

_ANSWERED = (0, 3)
_SECONDS_BY_ITSELF = 1.0
"""A signal from a terminal reaches the child too; a second one would disturb its clearing up."""
_SECONDS_TO_END = 8.0
"""What a child that was told to end has for removing what it made."""


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

    A context manager: traces and plans live in a folder of its own, which goes with it.
    """

    def __init__(self, options: list[str]) -> None:
        self._options = options
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
        words = [*self._options, "-f", "-o", str(trace), "--json"]
        if plan is not None:
            save_plan(plan, planned, overwrite=True)
            words += ["--plan", str(planned)]
        command = [sys.executable, "-m", "memplan", "estimate", *words, *program_words(program)]
        code, out, said = _run(command, quiet=quiet)
        if code not in _ANSWERED:
            raise CaptureFailedError(code, said)
        try:
            return Captured(load_trace(trace), msgspec.json.decode(out, type=Estimate))
        except msgspec.DecodeError as error:
            raise InternalError(f"the capture's answer cannot be read: {error}") from error


def program_words(program: ScriptTarget) -> list[str]:
    """The program as it stands at the end of a command line of ours."""
    return [*(["-m"] if program.kind == "module" else []), program.name, *program.argv]


def _run(command: list[str], *, quiet: bool) -> tuple[int, bytes, str]:
    """Exit code, stdout, and stderr where it was kept back."""
    with tempfile.TemporaryFile() as kept:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=kept if quiet else None,
        )
        try:
            out, _ = child.communicate()
        except BaseException:
            _end(child)
            raise
        kept.seek(0)
        return child.returncode, out, kept.read().decode(errors="replace")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminated, not killed: it has temporary files and workers of its own."""
    for ask, seconds in ((None, _SECONDS_BY_ITSELF), (child.terminate, _SECONDS_TO_END)):
        if ask is not None:
            ask()
        try:
            child.communicate(timeout=seconds)
            return
        except subprocess.TimeoutExpired:
            continue
    child.kill()
    child.communicate()
