"""Memory that a loader's batches leave behind, as where predictions are collected."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from memplan.capturing.state import CaptureState


class LeftBehind:
    """Compares the bytes in use from batch to batch, once the training was seen."""

    def __init__(self, state: CaptureState) -> None:
        self._state = state
        self._alive: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Bytes in use when each loader was last asked for a batch."""
        self.noted = ""
        """What batches leave behind, in words, while their loader is being read."""

    def before(self, loader: Any) -> int:
        """Bytes that the batch before this one keeps alive."""
        self.noted = ""
        recorder = self._state.recorder
        recorder.flush()
        before = self._alive.get(loader, recorder.live_bytes)
        self._alive[loader] = recorder.live_bytes
        return recorder.live_bytes - before

    def note(self, nbytes: int, batches: int) -> None:
        """A loader whose batches leave so many bytes behind is read on, after so many of them."""
        self.noted = (
            f"each batch of a data loader leaves {nbytes:,} bytes behind (predictions kept in a "
            f"list?), and only {batches} were seen; more of them need more"
        )

    def say(self) -> None:
        """To be called where the script is stopped: what is noted becomes an assumption."""
        if self.noted:
            self._state.assumptions.add("growth", self.noted)
            self.noted = ""
