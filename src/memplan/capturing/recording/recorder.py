"""Turns the lives of fake storages into the events of a `Trace`.

A storage's Python object lives exactly as long as its C++ object, so a weak reference's callback is
the moment at which the job lets go of the memory. Callbacks only queue: they may run inside any
other Python code, also between the columns of an event being appended. The queue is flushed before
the next event, so the order against allocations is kept.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from memplan.types.builder import TraceBuilder
from memplan.types.engines import Sizes
from memplan.types.trace import OUTSIDE, EventKind, Provenance, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(slots=True)
class LiveStorage:
    """A tracked storage generation that is alive."""

    number: int
    nbytes: int
    stream: int
    device: int
    low: int
    high: int
    """Bounds of `nbytes`; equal to it unless a rule gave the size."""
    reference: object
    """The weak reference that reports its death."""


class Recorder:
    """Live storages, and the builder that their events go to."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()
        self.live: dict[int, LiveStorage] = {}
        """Keyed by the address of the C++ storage."""
        self.live_bytes = 0
        """Bytes alive, each storage rounded up to 512."""
        self.peak_live_bytes = 0
        self.cached_bytes = self.peak_cached_bytes = 0
        """The most alive since the cache was last given back: what an allocator holds at least."""
        self.outside_bytes = 0
        """Held on the card outside of PyTorch's allocator."""
        self.stream = 0
        self.provenance = Provenance.OBSERVED
        """How storages that begin now are known."""
        self.at_most = False
        """What is asked for stands for something that may be smaller, or not be at all."""
        self.finished = False
        """Set once enough has been seen: what the script lets go of afterwards does not count."""
        self.before_event: Callable[[], None] | None = None
        """Lets go of what nobody holds any more but memplan."""
        self._dead: deque[int] = deque()

    def restart(self) -> None:
        """Forget the events so far; storages alive now are no longer tracked."""
        self.live.clear()
        self._dead.clear()
        self.live_bytes = self.peak_live_bytes = 0
        self.cached_bytes = self.peak_cached_bytes = 0
        self.builder.clear_events()

    def number_of(self, storage: torch.UntypedStorage) -> int:
        """The storage generation's number, or -1 when it is not tracked."""
        found = self.live.get(storage._cdata)
        return -1 if found is None else found.number

    def track(
        self,
        tensor: torch.Tensor,
        device: int,
        *,
        role: Role = Role.UNKNOWN,
        provenance: Provenance | None = None,
        low: int | None = None,
        high: int | None = None,
    ) -> int:
        """Number of the current generation of a tensor's storage; a new or resized one begins.

        `low` and `high` bound the size of a new one, where a rule gave it.
        """
        self.flush()  # first: the address of a dead storage may already be in use again
        storage = tensor.untyped_storage()
        key = storage._cdata
        nbytes = storage.nbytes()
        found = self.live.get(key)
        if found is not None:
            if found.nbytes == nbytes:
                return found.number
            self._end(found)
        number = self.builder.new_storage(
            role=role,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape="x".join(map(str, tensor.shape)),
        )
        reference = (
            found.reference if found is not None else weakref.ref(storage, partial(self._died, key))
        )
        low = (0 if self.at_most else nbytes) if low is None else low
        high = nbytes if high is None else high
        self.live[key] = LiveStorage(number, nbytes, self.stream, device, low, high, reference)
        if nbytes:
            self.builder.append(
                EventKind.ALLOC,
                number,
                nbytes,
                low=low,
                high=high,
                stream=self.stream,
                device=device,
                provenance=self.provenance if provenance is None else provenance,
            )
            self._count(nbytes)
        return number

    def scratch(self, low: int, expected: int, high: int, device: int, *, name: str = "") -> int:
        """Begin memory that a kernel takes for itself, derived by a rule. Ended by `release`."""
        self.flush()
        number = self.builder.new_storage(role=Role.WORKSPACE, name=name)
        self.builder.append(
            EventKind.ALLOC,
            number,
            expected,
            low=low,
            high=high,
            stream=self.stream,
            device=device,
            provenance=Provenance.RULE,
        )
        return number

    def release(self, number: int, low: int, expected: int, high: int, device: int) -> None:
        """End what `scratch` began."""
        self.flush()
        self.builder.append(
            EventKind.FREE,
            number,
            expected,
            low=low,
            high=high,
            stream=self.stream,
            device=device,
            provenance=Provenance.RULE,
        )

    def hold(self, sizes: Sizes, *, name: str, role: Role, stream: int) -> int:
        """Begin what somebody holds beside the job's tensors, known between bounds. Ended by
        `let_go`. On a stream from `OUTSIDE` on, PyTorch's allocator has no part in it."""
        self.flush()
        number = self.builder.new_storage(role=role, name=name)
        self._held(EventKind.ALLOC, number, sizes, stream)
        return number

    def let_go(self, number: int, sizes: Sizes, stream: int) -> None:
        """End what `hold` began."""
        self.flush()
        self._held(EventKind.FREE, number, sizes, stream)

    def _held(self, kind: EventKind, number: int, sizes: Sizes, stream: int) -> None:
        self.builder.append(
            kind,
            number,
            sizes.expected,
            low=sizes.low,
            high=sizes.high,
            stream=stream,
            provenance=Provenance.RULE,
        )
        change = sizes.expected if kind == EventKind.ALLOC else -sizes.expected
        if stream >= OUTSIDE:
            self.outside_bytes += change
        else:
            self._count(change)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A tracked storage has another size: a generation ends, and one of the same kind begins.

        What survives is copied, so the new memory is asked for before the old is let go; a storage
        that had none, or has none from now on, is only one of the two.
        """
        old = self.live.get(storage._cdata)
        nbytes = storage.nbytes()
        if old is None or old.nbytes == nbytes:
            return
        builder = self.builder
        number = old.number
        if nbytes:
            number = builder.new_storage_like(old.number)
            builder.append(EventKind.ALLOC, number, nbytes, stream=self.stream, device=old.device)
            self._count(nbytes)
        self._end(old)
        self.live[storage._cdata] = LiveStorage(
            number, nbytes, self.stream, old.device, nbytes, nbytes, old.reference
        )

    def mark(self, kind: EventKind, *, stream: int = 0, storage: int = -1, aux: int = -1) -> None:
        """Append an event that moves no bytes."""
        self.flush()
        self.builder.append(kind, storage, stream=stream, aux=aux)

    def flush(self) -> None:
        """Append the releases that happened since the last event."""
        if self.before_event is not None:
            self.before_event()
        while self._dead and not self.finished:
            key = self._dead.popleft()
            found = self.live.pop(key, None)
            if found is not None:
                self._end(found)

    def _died(self, key: int, _reference: object) -> None:
        self._dead.append(key)

    def _end(self, found: LiveStorage) -> None:
        if found.nbytes:
            self.builder.append(
                EventKind.FREE,
                found.number,
                found.nbytes,
                low=found.low,
                high=found.high,
                stream=found.stream,
                device=found.device,
            )
            self._count(-found.nbytes)

    def _count(self, nbytes: int) -> None:
        rounded = (abs(nbytes) + 511) // 512 * 512
        self.live_bytes += rounded if nbytes > 0 else -rounded
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        self.cached_bytes = max(self.cached_bytes, self.live_bytes)
        self.peak_cached_bytes = max(self.peak_cached_bytes, self.cached_bytes)
