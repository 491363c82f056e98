"""Ends what a script does after its training that takes long without the device."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import memplan
from memplan.capturing.patches.attributes import Patches
from memplan.types.installed import is_installed

_signal = signal.signal
_MEMPLAN = tuple(memplan.__path__)


class Waits:
    """An alarm clock, in a process whose main thread runs the capture and uses no alarm itself."""

    def __init__(self) -> None:
        self._set = False
        self._patches = Patches()

    def look(self, look: Callable[[], None], first: float, every: float = 1.0) -> None:
        """Call `look` after so many seconds, and then again and again, while the job's own code
        runs or waits. What `look` raises is raised there."""

        def ring(_signal: int, frame: FrameType | None) -> None:
            while frame is not None and is_installed(frame.f_code.co_filename):
                if frame.f_code.co_filename.startswith(_MEMPLAN):
                    return  # in the middle of an operator, which looks itself
                frame = frame.f_back
            look()

        if not self._set and signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
            return
        try:
            _signal(signal.SIGALRM, ring)
        except ValueError:  # another thread
            return
        if not self._set:
            self._patches.set(signal, "signal", self._another)
        self._set = True
        signal.setitimer(signal.ITIMER_REAL, first, every)

    def _another(self, number: int, handler: Any) -> Any:
        """The job handles signals: the alarm, whose default ends the process, is its own now."""
        if number == signal.SIGALRM:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return _signal(number, handler)

    def end(self) -> None:
        """Look no more."""
        if self._set:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _signal(signal.SIGALRM, signal.SIG_DFL)
            self._patches.undo()
            self._set = False
