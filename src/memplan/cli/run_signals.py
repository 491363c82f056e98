"""What a run writes in the end is written before a signal ends it, too."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

_taken: list[signal.Signals] = []
"""Signals that are handled now."""


@contextmanager
def finished(write: Callable[[], None], *, also_by_signal: bool) -> Iterator[None]:
    """Calls `write` when the block ends, whatever ends it.

    `also_by_signal`: SIGTERM and SIGHUP end the process as without us, but after `write`; a second
    one at once. Where they are ignored, as below nohup, they stay so, and a handler of the
    script's own takes the place of ours.
    """
    process = os.getpid()
    begun = False
    received: list[int] = []

    def write_once() -> None:
        nonlocal begun
        if not begun and os.getpid() == process:  # not in what the script forks
            begun = True
            write()

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if begun and len(received) == 1:  # it counts when all is written
            return
        try:
            write_once()
        finally:
            _end_by(number)

    if also_by_signal and threading.current_thread() is threading.main_thread():
        _taken[:] = [each for each in _SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    for number in _taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        try:
            write_once()
        finally:
            _give_back()
            if received:
                _end_by(received[0])


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _give_back() -> None:
    for number in _taken:
        if getattr(signal.getsignal(number), "__module__", "") == __name__:
            signal.signal(number, signal.SIG_DFL)
    _taken.clear()


# A child that waits in native code ends at once.
os.register_at_fork(after_in_child=_give_back)
