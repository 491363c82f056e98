"""Processes that capture, none of which outlives the one that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from memplan.types.deadline import Deadline
from memplan.types.trace import Trace
from memplan.types.trace_file import load_trace
from memplan.worker.failure import CaptureFailedError
from memplan.worker.request import CaptureRequest, Outcome
from memplan.worker.signals import raise_received

_SECONDS_BY_ITSELF = 1.0
"""A signal from a terminal reaches the child too; a second one would disturb its clearing up."""
_SECONDS_TO_END = 20.0
"""What a child that was told to end has for removing what it made."""
_SECONDS_BETWEEN_LOOKS = 0.05


class WorkerProcess:
    """A capture, running in a process of its own. Leaving the block ends it, as `end_all` does.

    The trace is left at `path`. `quiet`: what the process writes to stderr is kept back, for
    `CaptureFailedError.wrote`. Without a request it imports PyTorch and waits for `ask`.
    """

    def __init__(self, request: CaptureRequest | None, path: Path, *, quiet: bool = False) -> None:
        self.path = path
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self._kept = tempfile.TemporaryFile() if quiet else None  # noqa: SIM115
        self._asked = tempfile.TemporaryFile()  # noqa: SIM115
        waits, self._go = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "memplan.worker", str(self.path), str(waits)],
                stdin=self._asked,
                stdout=self._out,
                stderr=self._kept,
                pass_fds=[waits],
            )
        finally:
            os.close(waits)
        if request is not None:
            self.ask(request)

    def ask(self, request: CaptureRequest) -> None:
        with self._asked:
            self._asked.write(request.encoded())
            self._asked.seek(0)  # the process has the same position
        os.close(self._go)

    def dismiss(self) -> None:
        """One that nothing was asked of ends: it has made nothing yet."""
        self.process.kill()
        self.process.wait()
        os.close(self._go)
        self._asked.close()
        self.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_error: object) -> None:
        end_all([self])

    def close(self) -> None:
        """What it wrote can no longer be asked for."""
        self._out.close()
        if self._kept is not None:
            self._kept.close()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def trace(self) -> Trace:
        """What it has captured, once it has ended. Raises CaptureFailedError."""
        code = self.process.wait()
        outcome = outcome_of_process(code, all_of(self._out))
        if outcome.kind != "captured":
            raise CaptureFailedError(outcome, all_of(self._kept).decode(errors="replace"))
        return load_trace(self.path)


def outcome_of_process(code: int, answer: bytes) -> Outcome:
    """How a capture ended whose process ended with `code` and wrote `answer` to stdout."""
    by_signal = ended_by_signal(code)
    if by_signal is not None:
        return by_signal
    if not answer:  # what it wrote itself says why
        message = f"error: the process that captures ended with {code} and without an answer"
        return Outcome(kind="error", exit_code=1, message=message)
    try:
        return msgspec.json.decode(answer, type=Outcome)
    except msgspec.DecodeError as error:
        message = f"error: the capture's answer cannot be read: {error}"
        return Outcome(kind="error", exit_code=1, message=message)


def end_all(processes: Sequence[WorkerProcess]) -> None:
    """End those that run: terminated, not killed, for they have temporary files and workers of
    their own. Another Ctrl-C meanwhile terminates them at once, and one more kills them."""

    def all_ended() -> bool:
        return all(one.ended for one in processes)

    def terminate() -> None:
        for one in processes:
            one.process.terminate()
        Deadline(_SECONDS_TO_END).poll(all_ended, _SECONDS_BETWEEN_LOOKS)

    try:
        try:
            if not Deadline(_SECONDS_BY_ITSELF).poll(all_ended, _SECONDS_BETWEEN_LOOKS):
                terminate()
        except KeyboardInterrupt:
            terminate()
            raise
    finally:
        for one in processes:
            one.process.kill()
            one.process.wait()
            one.close()


def wait_for_any(processes: Sequence[WorkerProcess]) -> WorkerProcess:
    """The first of them that has ended."""

    def any_ended() -> bool:
        raise_received()
        return any(one.ended for one in processes)

    Deadline().poll(any_ended, _SECONDS_BETWEEN_LOOKS)
    return next(one for one in processes if one.ended)


def all_of(file: IO[bytes] | None) -> bytes:
    """What a process has written to a file, from its beginning; nothing for None."""
    if file is None:
        return b""
    file.seek(0)
    return file.read()


def ended_by_signal(code: int) -> Outcome | None:
    """What an exit code tells of a signal, the process's own (143) or the system's (-15); None
    where there was none."""
    try:
        number = signal.Signals(-code if code < 0 else code - 128)
    except ValueError:
        return None
    said = f"error: the capture was ended by {number.name}"
    if number is signal.SIGKILL:
        said += ", as Linux does where memory runs out"
        return Outcome(kind="out_of_memory", exit_code=4, message=said)
    if code > 0:  # it has cleared up
        return Outcome(kind="not_captured", exit_code=4, message=said)
    return Outcome(kind="error", exit_code=1, message=said)
