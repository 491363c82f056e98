"""Ends what a script does after its training that takes long without the device."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

import memplan
from memplan.types.installed import is_installed

_MEMPLAN = tuple(memplan.__path__)


class Waits:
    """An alarm clock, in a process whose main thread runs the capture and uses no alarm itself."""

    def __init__(self) -> None:
        self._set = False

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
            signal.signal(signal.SIGALRM, ring)
        except ValueError:  # another thread
            return
        self._set = True
        signal.setitimer(signal.ITIMER_REAL, first, every)

    def end(self) -> None:
        """Look no more."""
        if self._set:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            self._set = False
