"""Saved values in the host's memory from forward to backward: a plan's part `offload`.

A value is copied out on a stream of its own when autograd saves it, once for all views of its
storage; when and in which order its block is released and copied back is fixed by
`types.plan.OffloadPart`, so that a capture foretells every request. Blocks are requested and
released on the stream that computes, which waits for copies by events: no `record_stream`, which
would keep a released block from being used again at once. As in "vDNN" (Rhu et al., 2016), copies
go on beside the computing in both directions.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memplan.runtime import streams
from memplan.runtime.host_buffers import Buffer, HostBuffers
from memplan.runtime.tape.groups import checksum_of, modified_error
from memplan.runtime.tape.replay import plain_execution
from memplan.runtime.tape.storages import alias, share_storage
from memplan.runtime.tape.values import Value, View, version_of
from memplan.types.errors import OffloadError
from memplan.types.plan import OffloadPart


class Offload:
    """The part in effect, over all passes of a job."""

    def __init__(
        self,
        part: OffloadPart,
        on_note: Callable[[str], None] = lambda text: None,
        *,
        devices: tuple[str, ...] = ("cuda",),
    ) -> None:
        """`on_note` is told, in a sentence, what keeps values on the card. `devices`: kinds of
        device whose values are offloaded."""
        self.part = part
        self.buffers = HostBuffers(on_note)
        self.lock = threading.RLock()
        """Backward runs in a thread for each device."""
        self._on_note = on_note
        self._devices = devices
        self._lanes: dict[torch.device, Lane] = {}
        self._over = False

    def send(self, value: Value, of_pass: Pass, place: int) -> bool:
        """Begin to copy an available value to the host; whether it goes there."""
        base = value.base
        assert base is not None
        if self._over or base.device.type not in self._devices:
            return False
        nbytes, size = base.untyped_storage().nbytes(), base.element_size()
        if not nbytes or nbytes % size:
            return False
        with self.lock, plain_execution("memplan.offload"):
            try:
                lane = self._lane(base.device)
                buffer = self.buffers.take(nbytes, base)
            except (RuntimeError, MemoryError, OSError) as error:
                self._give_up(f"{error}")
                return False
            value.away = Away(lane, of_pass, place, base, buffer)
            of_pass.values[place] = value
            lane.sent(value, nbytes)
        return True

    def close(self) -> None:
        """Send no more. What is on the host stays there until backward has used it."""
        self._over = True
        with self.lock:
            self.buffers.close()

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = Lane(self.part, self.buffers, self.lock, device)
        return self._lanes[device]

    def _give_up(self, reason: str) -> None:
        self._over = True
        self._on_note(f"what the plan offloads stays on the card from here on: {reason}")


class Lane:
    """The copies of one device: its streams, and values that are copied and not released."""

    def __init__(
        self, part: OffloadPart, buffers: HostBuffers, lock: threading.RLock, device: torch.device
    ) -> None:
        self.part, self.buffers, self.lock = part, buffers, lock
        self.out, self.back = streams.new(device), streams.new(device)
        self._held: deque[tuple[ref[Value], int]] = deque()
        self._bytes = 0

    def sent(self, value: Value, nbytes: int) -> None:
        """Note that a copy has begun; release values that `out_bytes` were copied after."""
        self._held.append((ref(value), nbytes))
        self._bytes += nbytes
        while self._bytes - self._held[0][1] > self.part.out_bytes:
            reference, oldest = self._held.popleft()
            self._bytes -= oldest
            held = reference()
            if held is not None and held.away is not None:
                held.away.release(held)


class Pass:
    """The offloaded values of the calls of one pass, by their place in the plan's list."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._part = offload.part
        self.values: WeakValueDictionary[int, Value] = WeakValueDictionary()
        self.ahead = 0
        """Bytes that are fetched and not asked for."""

    def send(self, value: Value, place: int) -> bool:
        """See `Offload.send`."""
        return self._offload.send(value, self, place)

    def fetch_after(self, place: int) -> None:
        """Begin to copy back what follows, in order, as far as `ahead_bytes`."""
        for other in range(place + 1, len(self._part.values)):
            value = self.values.get(other)
            if value is not None and value.base is None and value.away is not None:
                if self.ahead + value.away.nbytes > self._part.ahead_bytes:
                    return
                value.away.fetch(value)


class Away:
    """The place of a value's content: on the card, on the host, or on its way. The callers hold its
    lock, which is the offload's."""

    def __init__(self, lane: Lane, of_pass: Pass, place: int, base: Tensor, buffer: Buffer) -> None:
        self.place = place
        self.nbytes = base.untyped_storage().nbytes()
        self.asked = False
        """Whether backward has asked for it: then it stays on the card."""
        self._ahead = False
        """Whether it is fetched and not asked for."""
        self.handles: WeakSet[AwayHandle] = WeakSet()
        self.witness = _witness(base)
        self.version = version_of(base)
        self._lane = lane
        self._pass = of_pass
        self._dtype, self._device = base.dtype, base.device
        self._stream = streams.current(base.device)
        """The stream that computes with the value."""
        self._buffer: Buffer | None = buffer
        self._block: Tensor | None = None
        """What is being copied to, until `_event`."""
        streams.wait(lane.out, streams.record(self._stream))
        streams.wait(lane.out, buffer.free)
        with streams.on(lane.out):
            self._on_host(buffer).copy_(self._flat(base), non_blocking=True)
        self._event = streams.record(lane.out)

    def release(self, value: Value) -> None:
        """Let its block be reused; its stream waits for the copy then."""
        if value.base is not None and not self.asked:
            streams.wait(self._stream, self._event)
            value.base = None

    def fetch(self, value: Value) -> None:
        """Begin to copy it back."""
        assert self._buffer is not None
        back, buffer = self._lane.back, self._buffer
        with plain_execution("memplan.fetch"):
            with streams.on(self._stream):
                size = self.nbytes // self._dtype.itemsize
                block = torch.empty(size, dtype=self._dtype, device=self._device)
            streams.wait(back, streams.record(self._stream))
            self._block = block
            with streams.on(back):
                block.copy_(self._on_host(buffer), non_blocking=True)
            self._event = streams.record(back)
        self._pass.ahead += 0 if self.asked else self.nbytes
        self._ahead = not self.asked
        value.keep(block)
        self._give_back()

    def ask(self, value: Value) -> Tensor:
        """The value on the card, for the current stream to read from here on."""
        with self._lane.lock:
            first, self.asked = not self.asked, True
            if value.base is None:
                self.fetch(value)
            if self._block is not None:
                for stream in {self._stream, streams.current(self._device)}:
                    streams.wait(stream, self._event)
                self._block = None
            if first:
                self._asked_for()
            assert value.base is not None
            return value.base

    def _asked_for(self) -> None:
        self._give_back()
        if self._ahead:
            self._ahead = False
            self._pass.ahead -= self.nbytes
        self._pass.fetch_after(self.place)

    def modified(self) -> bool:
        """Whether the storage that was copied has been written since."""
        return self.witness is not None and version_of(self.witness) != self.version

    def overwritten(self, value: Value, tensor: Tensor) -> None:
        """An op is about to write what was saved, which autograd's graph is to see, or to refuse
        by the version: it keeps the storage, as without a plan."""
        with self._lane.lock:
            kept = value.base is not None and share_storage(value.base, tensor)
            for handle in list(self.handles):
                handle.instead = value.base if kept else alias(tensor)
            value.away = None

    def _flat(self, base: Tensor) -> Tensor:
        size = self.nbytes // self._dtype.itemsize
        return View(Value(None, 0), self._dtype, (size,), (1,), 0).on(base)

    def _on_host(self, buffer: Buffer) -> Tensor:
        return buffer.bytes[: self.nbytes].view(self._dtype)

    def _give_back(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._lane.buffers.give(buffer, self._event)

    def __del__(self) -> None:
        with suppress(Exception), self._lane.lock:  # half made, or the process ends
            self._pass.ahead -= self.nbytes if self._ahead else 0
            if self._block is not None:  # a block that is still written is not for others
                streams.wait(self._stream, self._event)
            self._give_back()


class AwayHandle:
    """Stands for a saved tensor whose value is offloaded."""

    __slots__ = ("__weakref__", "_away", "_checksum", "_view", "instead")

    def __init__(self, view: View, away: Away, checksum: Tensor | None) -> None:
        """`checksum`: of the tensor; None where it is not to be checked."""
        self._view = view
        self._away = away
        self._checksum = checksum
        self.instead: Tensor | None = None
        """A tensor on the storage that was saved, if that is kept after all."""
        away.handles.add(self)

    def get(self) -> Tensor:
        """Raises RuntimeError, as autograd itself would, where the tensor was modified in place,
        and OffloadError where another than was saved came back."""
        away, view = self._away, self._view
        if away.modified():
            assert away.witness is not None
            raise modified_error(away.witness, away.version, view.size)
        if self.instead is not None:
            return view.on(self.instead)
        base = away.ask(view.value)
        if view.value.modified():
            raise modified_error(base, view.value.version, view.size)
        tensor = view.on(base)
        self._check(tensor)
        return tensor

    def _check(self, tensor: Tensor) -> None:
        expected, self._checksum = self._checksum, None
        if expected is None:
            return
        with torch.no_grad():
            now = checksum_of(tensor)
        if now is not None and int(now) != int(expected):
            raise OffloadError(
                f"a tensor came back from the host with other values than it had ({tensor.dtype} "
                f"of shape {list(tensor.shape)})",
                "something writes to it where PyTorch cannot see it; run without the plan, and "
                "please report the model",
            )


def _witness(base: Tensor) -> Tensor | None:
    """Has the version counter of a tensor and not its memory. Fake tensors need none: no backward
    of theirs is wrong."""
    if isinstance(base, FakeTensor) or base.is_inference():
        return None
    seen = alias(base)
    seen.data = torch.empty(0, dtype=base.dtype, device=base.device)
    return seen
