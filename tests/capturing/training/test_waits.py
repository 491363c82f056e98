"""The alarm clock of what follows a training."""

from __future__ import annotations

import signal

from memplan.capturing.training.waits import Waits


def test_a_job_that_takes_its_signals_back_is_not_ended_by_an_alarm() -> None:
    """As Lightning's Trainer, which puts back the handlers that it found."""
    before = signal.signal
    waits = Waits()
    waits.look(lambda: None, 100.0)
    try:
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    finally:
        waits.end()
    assert signal.signal is before
