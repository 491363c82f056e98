"""Buffers on the device that pieces of host tensors pass through, copied beside the computing.

A ring of bytes: while one piece is computed on, those to come are copied in behind it, and those
before are copied back out ahead of it. So many small pieces are ahead of the computing as few large
ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.operators.fake import record_launch
from memplan.runtime import streams
from memplan.runtime.update_by_pieces import Use, pieces
from memplan.types.op_names import STATE_TO_CARD, STATE_TO_HOST

PIECES = 3
"""Of the largest pieces, as many as it holds: one that comes, one in use, one that goes."""
ELEMENTS = 2**22
"""Elements of a piece: enough for the link's full rate, few compared with the card's memory."""


class Ring:
    """Buffers of one device, which stay for the whole run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.elements = ELEMENTS
        """Of a piece, at most."""
        self._in, self._out = streams.new(device), streams.new(device)
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        self._going: deque[tuple[range, Any]] = deque()
        """Places of the ring whose pieces go back, and the event after which they are on the
        host, in the order of these."""
        self._next = 0

    def pass_through(self, tensors: Sequence[Tensor], use: Use) -> None:
        """`use(start, stop, pieces)` for one piece of the flat host tensors after the other, with
        the pieces on the device, in order on the current stream. What it leaves in them is copied
        back. `synchronize()` before the host reads it."""
        ranges = list(pieces(tensors[0].numel(), self.elements))
        coming = self._fetch(tensors, *ranges[0])
        for number, (start, stop) in enumerate(ranges):
            place, buffers, arrived = coming
            if number + 1 < len(ranges):
                coming = self._fetch(tensors, *ranges[number + 1])
            streams.wait(streams.current(self._device), arrived)
            use(start, stop, buffers)
            self._send(place, tensors, start, stop, buffers)

    def synchronize(self) -> None:
        """Wait until everything is back on the host."""
        if self._out is not None:
            self._out.synchronize()

    def _fetch(self, tensors: Sequence[Tensor], start: int, stop: int) -> Any:
        place = self._place(stop - start)
        buffers = [
            self._buffer(number, tensor)[place.start : place.stop]
            for number, tensor in enumerate(tensors)
        ]
        with streams.on(self._in):
            self._wait_for(place)
            for buffer, tensor in zip(buffers, tensors, strict=True):
                _copy(buffer, tensor[start:stop], STATE_TO_CARD)
            return place, buffers, streams.record(self._in)

    def _place(self, elements: int) -> range:
        """Where the next piece lies: behind the one before, or at the beginning."""
        begin = self._next if self._next + elements <= PIECES * self.elements else 0
        self._next = begin + elements
        return range(begin, self._next)

    def _wait_for(self, place: range) -> None:
        """Until what was there is back on the host."""
        there = [
            number
            for number, (other, _) in enumerate(self._going)
            if other.start < place.stop and place.start < other.stop
        ]
        for _ in range(there[-1] + 1 if there else 0):
            streams.wait(self._in, self._going.popleft()[1])

    def _send(
        self, place: range, tensors: Sequence[Tensor], start: int, stop: int, buffers: list[Tensor]
    ) -> None:
        streams.wait(self._out, streams.record(streams.current(self._device)))
        with streams.on(self._out):
            for buffer, tensor in zip(buffers, tensors, strict=True):
                _copy(tensor[start:stop], buffer, STATE_TO_HOST)
            self._going.append((place, streams.record(self._out)))

    def _buffer(self, number: int, like: Tensor) -> Tensor:
        key = number, like.dtype
        if key not in self._buffers:
            made = torch.empty(PIECES * self.elements, dtype=like.dtype, device=self._device)
            # Its memory may still be in use by what had it before.
            streams.wait(self._in, streams.record(streams.current(self._device)))
            self._buffers[key] = made
        return self._buffers[key]


def _copy(target: Tensor, source: Tensor, name: str) -> None:
    """Without waiting for it; under a name of its own in a capture's trace."""
    from memplan.capturing import session

    card = target if name == STATE_TO_CARD else source
    if isinstance(card, FakeTensor) and session._active is not None:
        state = session._active.state
        record_launch(state, name, [card], [card] if card is target else [])
    else:
        target.copy_(source, non_blocking=True)
