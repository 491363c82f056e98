"""Decides when frozen weights come to the device: those that followed last time are copied
ahead."""

from __future__ import annotations

import threading
from weakref import ref

import torch
from torch import Tensor

from memplan.runtime.frozen.weight import Saved, Use, Weight

_MOST_AHEAD = 64
"""Uses that are looked at: what is small is not worth a look far ahead."""


_Place = tuple[Use, Weight]


class Schedule:
    """The schedule of one device. Requests depend only on the order of uses, not on clocks, so that
    a capture predicts them."""

    def __init__(self, ahead_bytes: int) -> None:
        self._most = ahead_bytes
        self._last: _Place | None = None
        self._pending: list[Weight] = []
        self.lock = threading.RLock()
        """Backward runs in a thread for each device."""

    def module_uses(self, weight: Weight) -> Tensor:
        """The weight on the device, for its module."""
        in_backward = torch._C._current_graph_task_id() != -1
        return self._ask((Use.AGAIN if in_backward else Use.FORWARD, weight))

    def backward_uses(self, saved: Saved) -> Tensor:
        """What was saved of a weight, on the device. Raises RuntimeError as `Saved.on` does."""
        return saved.on(self._ask((Use.SAVED, saved.weight)))

    def replay_uses(self, weight: Weight) -> Tensor:
        """The weight for a recomputation, which is fetched when its turn comes and not ahead."""
        with self.lock:
            return self._taken(weight)

    def begins(self) -> None:
        """A forward begins: what the last pass has left over is of no use."""
        with self.lock:
            self._last = None
            for weight in self._pending:
                weight.drop()
            self._pending.clear()

    def _ask(self, place: _Place) -> Tensor:
        with self.lock:
            if self._last is not None:
                self._last[1].following[self._last[0]] = place[0], ref(place[1])
            self._last = place
            block = self._taken(place[1])
            self._look_ahead(place, block)
            return block

    def _taken(self, weight: Weight) -> Tensor:
        if weight in self._pending:
            self._pending.remove(weight)
        return weight.take()

    def _look_ahead(self, place: _Place, block: Tensor) -> None:
        """Never from forward to backward, nor from there to the next forward: a job may write to
        the weights in between."""
        for _ in range(_MOST_AHEAD):
            following = place[1].following.get(place[0])
            if following is None or (following[0] is Use.FORWARD) != (place[0] is Use.FORWARD):
                return
            weight = following[1]()
            if weight is None:
                return
            if weight not in self._pending:
                ahead = sum(one.nbytes for one in self._pending)
                if ahead + weight.nbytes > self._most:
                    return
                if weight is place[1]:
                    weight.pending = block
                else:
                    weight.fetch()
                self._pending.append(weight)
            place = following[0], weight
