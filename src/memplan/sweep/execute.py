"""Runs captures and fits in processes of this machine. `ray_cluster` runs them in a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

import msgspec

from memplan.fit.answer import Fit
from memplan.types.errors import NoAnswerError
from memplan.types.trace import Trace
from memplan.types.trace_file import load_trace
from memplan.worker.failure import CaptureFailedError
from memplan.worker.pool import HOST_BYTES, available_bytes
from memplan.worker.process import all_of, ended_by_signal, outcome_of_process
from memplan.worker.request import CaptureRequest, Outcome

OUTPUT = "{output}"
"""Stands for the path of the output among the words of a command."""
_SECONDS_TO_END = 5.0
_ANSWERS = (0, 3)
"""Exit codes of `memplan fit` with an answer on stdout."""


class Ended(msgspec.Struct, frozen=True):
    """A process of ours that has ended."""

    code: int
    out: bytes
    wrote: str


class StoppedError(Exception):
    """The sweep was ended before this began."""


class Executor(Protocol):
    """Runs `python -m …` somewhere."""

    jobs: int
    """So many at once."""

    def run(self, words: Sequence[str], given: bytes, output: Path) -> Ended:
        """Run `python -m WORDS` with `given` on stdin, and `output` in place of OUTPUT among the
        words; what it writes there, if anything, is there afterwards. Raises StoppedError, and
        CaptureFailedError where the place it ran in was lost."""

    def stop(self) -> None:
        """End what runs; nothing begins any more."""

    def close(self) -> None:
        """Nothing is asked of it any more."""


class LocalProcesses:
    """Processes of this machine, `jobs` at once: by default as many as there are CPUs and memory
    for. One that runs for more than `timeout` seconds is ended."""

    def __init__(self, jobs: int | None = None, timeout: float | None = None) -> None:
        self.jobs = jobs or _room()
        self._timeout = timeout
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, words: Sequence[str], given: bytes, output: Path) -> Ended:
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as out:
            asked.write(given)
            asked.seek(0)
            with tempfile.TemporaryFile() as wrote:
                process = self._start(command(words, output), asked, out, wrote)
                try:
                    code = process.wait(self._timeout)
                except subprocess.TimeoutExpired as error:
                    end([process])
                    raise CaptureFailedError(timed_out(error.timeout)) from None
                finally:
                    with self._lock:
                        self._running.discard(process)
                if self._stopped:
                    raise StoppedError
                return Ended(code, all_of(out), all_of(wrote).decode(errors="replace"))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            running = list(self._running)
        end(running)

    def close(self) -> None:
        pass

    def _start(
        self, words: list[str], asked: IO[bytes], out: IO[bytes], wrote: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise StoppedError
            # In a session of its own: Ctrl-C is for this process, which then ends those.
            process = subprocess.Popen(
                words,
                stdin=asked,
                stdout=out,
                stderr=wrote,
                start_new_session=True,
            )
            self._running.add(process)
        return process


def command(words: Sequence[str], output: Path) -> list[str]:
    """The command of a process that ends with the thread that starts it."""
    asked = [str(output) if word == OUTPUT else word for word in words]
    return [sys.executable, "-P", "-m", "memplan.worker.tied", *asked]


def capture(executor: Executor, request: CaptureRequest, path: Path) -> Trace:
    """The trace of a request, kept at `path`. Raises CaptureFailedError."""
    ended = executor.run(["memplan.worker", OUTPUT], request.encoded(), path)
    outcome = _lost(ended.code) or outcome_of_process(ended.code, ended.out)
    if outcome.kind != "captured":
        raise CaptureFailedError(outcome, ended.wrote)
    return load_trace(path)


def fit(executor: Executor, words: Sequence[str], plan: Path) -> Fit:
    """The answer of `memplan fit WORDS`, and its plan at `plan`, if it has one. Raises
    CaptureFailedError."""
    own = ["memplan", "fit", "--json", "-f", "-o", OUTPUT]
    ended = executor.run([*own, *words], b"", plan)
    if ended.code in _ANSWERS:
        return msgspec.json.decode(ended.out, type=Fit)
    said = ended.wrote.rpartition("memplan: ")[2].partition("\n")[0] or f"exit code {ended.code}"
    known = Outcome(kind="error", exit_code=ended.code, message=said)
    raise CaptureFailedError(_lost(ended.code) or known)


def timed_out(seconds: float) -> Outcome:
    said = f"error: no answer within {seconds:g} s (--timeout)"
    return Outcome(kind="error", exit_code=NoAnswerError.exit_code, message=said)


def end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask processes to end, which end their own first, and kill those that do not, with their
    own. Each leads a session."""
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()


def _lost(code: int) -> Outcome | None:
    """The outcome of a process that a signal ended: nothing is known about the script then."""
    outcome = ended_by_signal(code)
    return None if outcome is None else msgspec.structs.replace(outcome, kind="error")


def _room() -> int:
    return max(min(os.cpu_count() or 1, available_bytes() // HOST_BYTES), 1)
