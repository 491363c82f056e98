"""Peaks since different beginnings, of counters that know one.

The user's begins with the job, or where the job resets it; ours where a plan came into effect.
"""

from __future__ import annotations

from memplan.runtime.planned.library import Library, Statistics

_PEAKS = ("allocated_peak", "requested_peak", "reserved_peak")


class Peaks:
    """The peaks of all devices, in bytes."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._users: dict[tuple[int, str], int] = {}
        """Reached before the counters were last reset."""
        self._ours: dict[tuple[int, str], int] = {}

    def statistics(self, device: int) -> Statistics | None:
        """What the device's allocator counts, with the peaks that the user is to see."""
        found = self._library.statistics(device)
        if found is not None:
            for name in _PEAKS:
                before = self._users.get((device, name), 0)
                setattr(found, name, max(before, getattr(found, name)))
        return found

    def ours(self, device: int) -> dict[str, int]:
        """The peaks since `begin_ours`, or since the job began."""
        found = self._library.statistics(device)
        if found is None:
            return dict.fromkeys(_PEAKS, 0)
        return {
            name: max(self._ours.get((device, name), 0), getattr(found, name)) for name in _PEAKS
        }

    def reset_users(self, device: int) -> None:
        """The job resets its peaks."""
        self._ours.update({(device, name): peak for name, peak in self.ours(device).items()})
        for name in _PEAKS:
            self._users.pop((device, name), None)
        self._library.reset_peaks(device)

    def begin_ours(self, device: int) -> None:
        """Ours begin here."""
        found = self.statistics(device)
        if found is not None:
            self._users.update({(device, name): getattr(found, name) for name in _PEAKS})
        for name in _PEAKS:
            self._ours.pop((device, name), None)
        self._library.reset_peaks(device)
