"""SIGTERM and SIGHUP end a command as Ctrl-C does: what it has begun is cleaned up first."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from memplan.types.deadline import Deadline

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_SECONDS_TO_CLEAN_UP = 5.0

_taken: list[signal.Signals] = []
"""Signals that `ended_by_signal` handles now."""
_received: list[tuple[int, Deadline]] = []
"""The first of them that came, and until when a second one is taken for the same."""
_interrupts = 0
"""How often Ctrl-C was pressed while a command ran that answers all the same."""


class Terminated(KeyboardInterrupt):
    """A signal asked this process to end. Scripts take it for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def ended_by_signal(command: Callable[[], int], *, say: bool = True, answers: bool = False) -> int:
    """Run `command`; its exit code, or 128 + the signal that ended it. `say`: tell so on stderr.

    A signal that the user's program swallows still counts once the program has ended, unless the
    command `answers` all the same: that runs no program of the user's in this process, and has
    Ctrl-C counted for `raise_received`. A second one, some seconds later, ends the process at once.
    """
    global _interrupts
    _received.clear()
    _interrupts = 0
    counts = answers and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def handle(number: int, _frame: FrameType | None) -> None:
        if not _received:
            _received.append((number, Deadline(_SECONDS_TO_CLEAN_UP)))
            raise Terminated(number)
        # `timeout` and the like send theirs twice.
        if _received[0][1].passed:
            os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    # nohup ignores SIGHUP, and so it shall stay.
    _taken[:] = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
    for number in _taken:
        signal.signal(number, handle)
    if counts:
        signal.signal(signal.SIGINT, _interrupt)
    code = None
    try:
        code = command()
    except Terminated:
        pass
    finally:
        for number in _taken:
            signal.signal(number, before[number])
        _taken.clear()
        if counts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if not _received or (answers and code is not None):
        return code or 0
    by = signal.Signals(_received[0][0])
    if say:
        sys.stderr.write(f"memplan: ended by {by.name}\n")
    return 128 + by


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    global _interrupts
    _interrupts += 1
    raise KeyboardInterrupt


def raise_received() -> None:
    """Raise again what a signal raised, Terminated or KeyboardInterrupt, before a wait that may be
    long. Python drops an exception that a handler raises while a finalizer or a callback of a weak
    reference runs."""
    if _taken and _received:
        raise Terminated(_received[0][0])
    if _interrupts:
        raise KeyboardInterrupt


def raise_second_interrupt() -> None:
    """Raise KeyboardInterrupt where Ctrl-C was pressed once more after it had ended a wait."""
    if _interrupts > 1:
        raise KeyboardInterrupt


@contextmanager
def signals_later() -> Iterator[None]:
    """A context manager in which signals that end a command wait until the block has ended: a
    process that was started but is not known yet would be left behind. The process inherits this
    (`signals_now`)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signals_now() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *_SIGNALS})


def _forget_in_child() -> None:
    """A worker that is told to end has nothing of ours to clean up."""
    for number in _taken:
        signal.signal(number, signal.SIG_DFL)
    _taken.clear()


os.register_at_fork(after_in_child=_forget_in_child)
