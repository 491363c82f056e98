"""Time limits that do not depend on what else the machine does."""

from __future__ import annotations

import time

_BY_THE_CLOCK = 4.0
"""Seconds by the clock for each processor second."""


class Patience:
    """Lasts so many processor seconds of this process, and by the clock at most four times as
    long."""

    def __init__(self, seconds: float) -> None:
        self._end = time.process_time() + seconds
        self._latest = time.monotonic() + _BY_THE_CLOCK * seconds

    @property
    def over(self) -> bool:
        return time.process_time() > self._end or time.monotonic() > self._latest
