"""When work ends: every search, and every wait, has one of these."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

PATIENCE = 4.0
"""Seconds by the clock that work may take for each second of CPU time that it was given."""
SEARCH_PATIENCE = 20.0
"""The same for a search, which computes all the time: the less of the machine it gets, the longer
it takes, as captures do, rather than find less."""
_FOREVER_SECONDS = 1e9
_LOOK_SECONDS = 0.1
_T = TypeVar("_T")


class Deadline:
    """So many seconds from now on, for ever without them, and no longer once `end` is called.

    By the clock; with `cpu_time` in CPU time of this process, so that an answer does not depend on
    what else the machine does, and by the clock at most `patience` times as long.
    """

    def __init__(
        self, seconds: float = math.inf, *, cpu_time: bool = False, patience: float = PATIENCE
    ) -> None:
        self._never = seconds == math.inf
        self._cpu_time = cpu_time
        self._patience = patience
        self._cpu_end = time.process_time() + seconds
        self._began = time.monotonic()
        self._end = self._began + (patience if cpu_time else 1) * seconds
        self.stop = bytearray(1)
        """1 once `end` was called; native code looks at it."""

    def left(self) -> float:
        """Seconds; 0 once it is time to stop. Always finite: native code adds them to its clock."""
        if self.stop[0]:
            return 0.0
        left = self._end - time.monotonic()
        if self._cpu_time:
            left = min(self._cpu_end - time.process_time(), left / self._patience)
        return min(max(left, 0.0), _FOREVER_SECONDS)

    @property
    def passed(self) -> bool:
        return self.left() <= 0

    def end(self) -> None:
        """It is time to stop, from any thread or signal handler."""
        self.stop[0] = 1

    @property
    def ended(self) -> bool:
        """Whether somebody asked."""
        return bool(self.stop[0])

    def spent(self) -> float:
        """Seconds by the clock since it was made."""
        return time.monotonic() - self._began

    def again(self, seconds: float) -> Deadline:
        """Another one, of so many seconds from now on, that ends with this one's `end`, too."""
        other = Deadline(seconds, cpu_time=self._cpu_time, patience=self._patience)
        other.stop = self.stop
        return other

    def part(self, parts: int, most_seconds: float = math.inf) -> Deadline:
        """An equal share of what is left, and no more than so much. What never ends has no
        shares: whoever works by it gets the same answer on every machine."""
        return self if self._never else self.again(min(self.left() / parts, most_seconds))

    def poll(self, done: Callable[[], bool], every_seconds: float) -> bool:
        """Wait for `done` to answer true; False where the deadline comes first."""
        while not done():
            if self.passed:
                return False
            time.sleep(every_seconds)
        return True

    def result_of(self, work: Callable[[], _T], cancel: Callable[[], None] | None = None) -> _T:
        """The result of native work in a thread of its own: Python runs signal handlers in the main
        thread, which waits here in a way that lets them run.

        `work` looks at `stop`, or `cancel` ends it. Raises what it raises.
        """
        results: list[_T] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        worker = threading.Thread(target=run, name="memplan-search")
        with self.ended_by_errors():
            worker.start()
            # Not join: Ctrl-C in it has Python 3.11 take the thread for ended, and exit under it.
            while not done.wait(_LOOK_SECONDS):
                if cancel is not None and self.passed:
                    cancel()
        if errors:
            raise errors[0]
        return results[0]

    @contextlib.contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """An error that leaves this block, Ctrl-C above all, stops what other threads do."""
        try:
            yield
        except BaseException:
            self.end()
            raise
