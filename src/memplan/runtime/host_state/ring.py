"""Buffers on the device that pieces of host tensors pass through, copied beside the computing.

Three slots: while the piece in one is computed on, the next piece is copied into another, and the
piece before is copied back out of the third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memplan.runtime import streams

SLOTS = 3
ELEMENTS = 2**22
"""Elements of a piece: enough for the link's full rate, few compared with the card's memory."""


class Ring:
    """Buffers of one device, which stay for the whole run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in, self._out = streams.new(device), streams.new(device)
        self._buffers: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._free: list[Any] = [None] * SLOTS
        """For each slot, the event after which its piece is back on the host."""
        self._next = 0

    def pass_through(
        self, tensors: Sequence[Tensor], use: Callable[[int, int, list[Tensor]], None]
    ) -> None:
        """`use(start, stop, pieces)` for one piece of the flat host tensors after the other, with
        the pieces on the device, in order on the current stream. What it leaves in them is copied
        back. `synchronize()` before the host reads it."""
        ranges = list(pieces(tensors[0].numel()))
        coming = self._fetch(tensors, *ranges[0])
        for number, (start, stop) in enumerate(ranges):
            slot, buffers, arrived = coming
            if number + 1 < len(ranges):
                coming = self._fetch(tensors, *ranges[number + 1])
            streams.wait(streams.current(self._device), arrived)
            use(start, stop, buffers)
            self._send(slot, tensors, start, stop, buffers)

    def synchronize(self) -> None:
        """Wait until everything is back on the host."""
        if self._out is not None:
            self._out.synchronize()

    def _fetch(self, tensors: Sequence[Tensor], start: int, stop: int) -> Any:
        slot, self._next = self._next, (self._next + 1) % SLOTS
        buffers = [
            self._buffer(slot, place, tensor)[: stop - start]
            for place, tensor in enumerate(tensors)
        ]
        with streams.on(self._in):
            streams.wait(self._in, self._free[slot])
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor[start:stop], non_blocking=True)
            return slot, buffers, streams.record(self._in)

    def _send(
        self, slot: int, tensors: Sequence[Tensor], start: int, stop: int, buffers: list[Tensor]
    ) -> None:
        streams.wait(self._out, streams.record(streams.current(self._device)))
        with streams.on(self._out):
            for buffer, tensor in zip(buffers, tensors, strict=True):
                tensor[start:stop].copy_(buffer, non_blocking=True)
            self._free[slot] = streams.record(self._out)

    def _buffer(self, slot: int, place: int, like: Tensor) -> Tensor:
        key = slot, place, like.dtype
        if key not in self._buffers:
            made = torch.empty(ELEMENTS, dtype=like.dtype, device=self._device)
            # Its memory may still be in use by what had it before.
            streams.wait(self._in, streams.record(streams.current(self._device)))
            self._buffers[key] = made
        return self._buffers[key]


def pieces(elements: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most ELEMENTS that cover `[0, elements)`."""
    for start in range(0, elements, ELEMENTS):
        yield start, min(start + ELEMENTS, elements)
