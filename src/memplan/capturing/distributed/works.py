"""Handles of collectives: what a script waits for.

An asynchronous collective of NCCL runs on the communicator's own stream and keeps its tensors
alive until it is waited for (`ProcessGroupNCCL`, since 2.8 without `record_stream`), its outputs
until the handle is dropped (`WorkNCCL::outputs_`); a synchronous one runs on the current stream.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import Work

_KEPT = 64
_OWN_REFERENCES = 3  # the queue's, the loop variable's and `getrefcount`'s own


class Batch:
    """What one batch has been given so far."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.done: Callable[[], None] | None = None
        """What waiting for the batch does; None while nothing in it is asynchronous."""


class RankWork(Work):
    """A collective that is done at once, except that its tensors stay until `wait()`, and the
    outputs of one that is no batch for as long as somebody has the handle."""

    def __init__(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        on_wait: Callable[[], None],
        waited: list[RankWork] | None = None,
    ) -> None:
        """`waited` is the list of what keeps its outputs after `wait()`; None for a batch."""
        super().__init__()
        self._outputs = len(outputs)
        self._waited = waited
        self._tensors = [*outputs, *inputs]
        self._on_wait: Callable[[], None] | None = on_wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream waits; nothing blocks."""
        if self._on_wait is not None:
            self._on_wait()
            self._on_wait = None
            if self._waited is not None and self._outputs:
                self._waited.append(self)
        del self._tensors[0 if self._waited is None else self._outputs :]
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
        self.waited: list[RankWork] = []
        """Works that were waited for and still keep their outputs."""

    def kept(self, work: RankWork) -> RankWork:
        """The same, while C++ may ask for it."""
        for kept in self._kept:
            if sys.getrefcount(kept) <= _OWN_REFERENCES:
                kept.release()  # dropped without a wait
        self._kept.append(work)
        return work

    def let_go(self) -> None:
        """Release outputs of works that were waited for and dropped since."""
        for work in self.waited[:] if self.waited else ():
            if sys.getrefcount(work) <= _OWN_REFERENCES + 2:  # both lists'
                work.release()
                self.waited.remove(work)

    def clear(self) -> None:
        self._kept.clear()
        self.waited.clear()
