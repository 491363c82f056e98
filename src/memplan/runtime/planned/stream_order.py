"""Which stream's work comes after which other's, as a job says it while it is recorded.

Memory of a stream may be used again by another as soon as that one waits for it. A recording that
did not know of waits would give every request of a second stream (FSDP's gathers) the whole round.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch

from memplan.capturing.patches.attributes import Patches
from memplan.runtime.planned.recording import Recording
from memplan.types.trace import EventKind

_NUMBER = "_memplan_number"
"""Attribute of an event: that of its last record."""


class StreamOrder:
    """Tells a recording of events and waits that go through `torch.cuda`; a context manager."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._numbers = count()
        self._patches = Patches()

    def __enter__(self) -> StreamOrder:
        event, stream = torch.cuda.Event, torch.cuda.Stream
        self._wrap(event, "record", self._recorded)
        self._wrap(event, "wait", self._waited)
        self._wrap(stream, "synchronize", self._stream_done)
        self._wrap(torch._C, "_cuda_synchronize", self._all_done)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._patches.undo()

    def _wrap(self, where: Any, name: str, then: Any) -> None:
        former = where.__dict__.get(name)
        if former is None:  # PyTorch is built without CUDA
            return

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            done = former(*arguments, **keywords)
            then(*arguments, **keywords)
            return done

        self._patches.set(where, name, wrapped)

    def _recorded(self, event: Any, stream: Any = None) -> None:
        stream = stream or torch.cuda.current_stream()
        number = next(self._numbers)
        setattr(event, _NUMBER, number)
        self._tell(EventKind.EVENT_RECORD, stream, number)

    def _waited(self, event: Any, stream: Any = None) -> None:
        number = getattr(event, _NUMBER, None)
        if number is not None:
            self._tell(EventKind.EVENT_WAIT, stream or torch.cuda.current_stream(), number)

    def _stream_done(self, stream: Any) -> None:
        self._tell(EventKind.SYNCHRONIZE, stream)

    def _all_done(self) -> None:
        self._recording.order(EventKind.SYNCHRONIZE, torch.cuda.current_device())

    def _tell(self, kind: EventKind, stream: Any, number: int = -1) -> None:
        self._recording.order(kind, stream.device_index, stream.cuda_stream, number)
