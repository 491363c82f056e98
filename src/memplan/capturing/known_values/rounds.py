"""Compares the turns of a loop by what they ask of the device's memory."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from memplan.capturing.recording.recorder import Recorder


class _Turn(NamedTuple):
    end: int
    """The event after its last."""
    requests: bytes
    live_bytes: int


class Rounds:
    """Knows the last turn of the loop at each place."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last: dict[str, tuple[_Turn, int]] = {}

    def alike(self, place: str) -> int:
        """To be called once in each turn of the loop at a place. Returns how many turns in a row,
        with the one that ends here, asked for the same memory and kept none of it."""
        recorder, builder = self._recorder, self._recorder.builder
        recorder.flush()
        end = len(builder)
        before, times = self._last.get(place, (_Turn(end, b"", 0), 0))
        requests = blake2b(builder.requests(min(before.end, end), end)).digest()
        now = _Turn(end, requests, recorder.live_bytes)
        times = times + 1 if now[1:] == before[1:] else 1
        self._last[place] = now, times
        return times
