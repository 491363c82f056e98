"""Handles of collectives: what a script waits for.

An asynchronous collective of NCCL runs on the communicator's own stream and keeps its tensors
alive until it is waited for (`ProcessGroupNCCL`, since 2.8 without `record_stream`); a synchronous
one runs on the current stream.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    Work,
    _create_work_from_future,
)

_KEPT = 64
_REFERENCES_OF_THE_QUEUE = 3  # the queue's, the loop variable's and `getrefcount`'s own


class RankWork(Work):
    """A collective that is done at once, except that its tensors stay until `wait()`."""

    def __init__(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        on_wait: Callable[[], None],
    ) -> None:
        super().__init__()
        self._outputs = len(outputs)
        self._tensors = [*outputs, *inputs]
        self._on_wait: Callable[[], None] | None = on_wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream waits; nothing blocks."""
        if self._on_wait is not None:
            self._on_wait()
            self._on_wait = None
        self.release()
        return True

    def release(self) -> None:
        """Let go of the tensors."""
        self._tensors = []

    def get_future(self) -> Any:
        return done(self.result())

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._tensors[: self._outputs]

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


def done(outputs: list[torch.Tensor]) -> Any:
    """A future that has its result."""
    future: Any = torch.futures.Future()
    future.set_result(outputs)
    return future


def finished(outputs: list[torch.Tensor]) -> Work:
    """The handle of a collective that is done."""
    work: Work = _create_work_from_future(done(outputs))
    return work


class Works:
    """Keeps the last handles alive: C++ forgets what Python overrides once its object is gone."""

    def __init__(self) -> None:
        self._kept: deque[RankWork] = deque(maxlen=_KEPT)

    def kept(self, work: RankWork) -> RankWork:
        """The same, while C++ may ask for it."""
        for kept in self._kept:
            if sys.getrefcount(kept) <= _REFERENCES_OF_THE_QUEUE:
                kept.release()  # dropped without a wait
        self._kept.append(work)
        return work

    def clear(self) -> None:
        self._kept.clear()
