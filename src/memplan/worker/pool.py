"""Captures side by side, as many as this machine has cores and memory for."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from memplan.worker.process import WorkerProcess, end_all, wait_for_any
from memplan.worker.request import CaptureRequest
from memplan.worker.signals import signals_later

HOST_BYTES = 3 << 30
"""What a capture is taken to need before one has been seen."""
_READY = 2
"""Processes that have imported PyTorch and wait, at most."""


class Workers:
    """A context manager: leaving it ends what still runs and removes the traces. A request that
    was made before is not captured again."""

    def __init__(self) -> None:
        self.running: list[WorkerProcess] = []
        self._started: dict[str, WorkerProcess] = {}
        self._waiting: dict[str, CaptureRequest] = {}
        """Asked for ahead."""
        self._ready: list[WorkerProcess] = []
        self._numbers = count()
        self._peak_bytes = 0
        self._stack = ExitStack()

    def __enter__(self) -> Workers:
        folder = tempfile.TemporaryDirectory(prefix="memplan-captures-")
        self._folder = Path(self._stack.enter_context(folder))
        return self

    def __exit__(self, *_error: object) -> None:
        with self._stack:
            for process in self._ready:
                process.dismiss()
            end_all(list(self._started.values()))

    def has_room(self, beyond: int = 0) -> bool:
        """Whether another capture can run beside those that do; `beyond`: with so many more than
        there are CPUs."""
        running = sum(not one.ended for one in self.running)
        if not running:
            return True
        if running >= (os.cpu_count() or 1) + beyond:
            return False
        # Those that run may not have taken their share yet.
        return available_bytes() > (1 + running) * (self._peak_bytes or HOST_BYTES)

    def start(self, request: CaptureRequest, *, quiet: bool = False) -> WorkerProcess:
        """The process of this request; `quiet` as there."""
        key = request.key()
        self._waiting.pop(key, None)
        if key not in self._started:
            with signals_later():
                process = self._waiting_one() if quiet and _imports_alike(request) else None
                if process is not None:
                    process.ask(request)
                else:
                    process = WorkerProcess(request, self._folder / f"{key}.trace", quiet=quiet)
                self._started[key] = process
            self.running.append(process)
        return self._started[key]

    def get_ready(self) -> None:
        """Have processes start that the next requests find waiting, where there are CPUs for
        them."""
        most = min(_READY, (os.cpu_count() or 1) - 1) if self.has_room() else 0
        while len(self._ready) < most and available_bytes() > 2 * (self._peak_bytes or HOST_BYTES):
            with signals_later():
                path = self._folder / f"{next(self._numbers)}.trace"
                self._ready.append(WorkerProcess(None, path, quiet=True))

    def ahead(self, request: CaptureRequest) -> WorkerProcess | None:
        """The process of this request if it has ended. Else it starts, quietly, when there is room
        beside what is waited for."""
        process = self._started.get(request.key())
        if process is None:
            self._waiting[request.key()] = request
            self._start_waiting()
        return process if process is not None and process.ended else None

    def _waiting_one(self) -> WorkerProcess | None:
        while self._ready:
            process = self._ready.pop(0)
            if not process.ended:
                return process
            process.dismiss()
        return None

    def ended(self, request: CaptureRequest, *, quiet: bool = False) -> WorkerProcess:
        """The process of this request, which has ended."""
        while request.key() not in self._started and not self.has_room(beyond=1):
            self.next_ended()
        process = self.start(request, quiet=quiet)
        while not process.ended:
            self._start_waiting()
            self.next_ended()
        return process

    def next_ended(self) -> WorkerProcess:
        """The first of those that run to end."""
        ended = wait_for_any(self.running)
        self.running.remove(ended)
        return ended

    def _start_waiting(self) -> None:
        while self._waiting and self.has_room():
            self.start(next(iter(self._waiting.values())), quiet=True)

    def seen(self, peak_bytes: int) -> None:
        """A capture needed so much memory of this machine."""
        self._peak_bytes = max(self._peak_bytes, peak_bytes)


def _imports_alike(request: CaptureRequest) -> bool:
    """Whether its launcher leaves it where this process looks for modules."""
    return "PYTHONPATH" not in request.options.environment


def available_bytes() -> int:
    """Memory of this machine that can still be had; plenty where that is not known."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 1 << 62
