"""Executors that capture nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from memplan.sweep.execute import Ended, StoppedError
from memplan.types.trace_file import save_trace
from memplan.worker.request import CaptureRequest, Outcome, read_request
from tests.estimation.jobs import training_job


class Recorded:
    """Gives every request the same small trace, and notes what was asked."""

    jobs = 2

    def __init__(self, refuse: str = "") -> None:
        self.asked: list[CaptureRequest] = []
        self.stopped = threading.Event()
        self._refuse = refuse
        """A word of the script's arguments with which it raises."""

    def run(self, words: Sequence[str], given: bytes, output: Path) -> Ended:
        if words[0] == "memplan":
            return self.fit(words, output)
        request = read_request(given)
        self.asked.append(request)
        if self._refuse in request.program.argv:
            outcome = Outcome(kind="not_captured", exit_code=4, message="error: the script raised")
            return Ended(4, msgspec.json.encode(outcome), "")
        save_trace(training_job(), output, overwrite=True)
        return Ended(0, msgspec.json.encode(Outcome()), "")

    def fit(self, words: Sequence[str], output: Path) -> Ended:
        raise AssertionError(words)

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        pass


class Waiting(Recorded):
    """Answers the first request, and waits with all others until it is stopped."""

    jobs = 1

    def run(self, words: Sequence[str], given: bytes, output: Path) -> Ended:
        if self.asked:
            self.stopped.wait()
            raise StoppedError
        return super().run(words, given, output)
