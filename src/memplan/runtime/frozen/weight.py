"""One frozen weight in the host's memory, and its copies on the device.

While no module uses it, the parameter is a tensor of the device all the same, on the host's
page-locked memory, which a card reads and writes over its link. So whatever a job does to it (a
checkpoint, an average of weights, a merge of adapters, use by a module that is not its own) is
right, if slow; nothing has to be foreseen.
"""

from __future__ import annotations

import mmap
import sys
from enum import Enum
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memplan.runtime import streams
from memplan.runtime.host_buffers import PageLock
from memplan.runtime.tape.groups import modified_error
from memplan.runtime.tape.replay import ON_HOST, plain_execution
from memplan.runtime.tape.storages import share_storage
from memplan.runtime.tape.values import Value, View, version_of
from memplan.types.op_names import FETCH
from memplan.types.trace import Role


class RefusedError(Exception):
    """The host does not give memory that the card can reach."""


class Use(Enum):
    """By what a weight is read."""

    FORWARD = 0
    AGAIN = 1
    """A module that runs again in backward (activation checkpointing)."""
    SAVED = 2
    """Backward, from autograd's saved tensors."""


class Weight:
    """A parameter whose content is on the host."""

    def __init__(self, parameter: Tensor, lock: PageLock, copies: Any) -> None:
        """`copies`: the stream of copies to the device. Raises RefusedError."""
        self._parameter = ref(parameter)
        self.nbytes = parameter.untyped_storage().nbytes()
        self.pending: Tensor | None = None
        """The copy on the device that is not used yet."""
        self._kept: Tensor | None = None
        self.following: dict[Use, tuple[Use, ref[Weight]]] = {}
        """What was used after it the last time."""
        self.checked = isinstance(parameter, FakeTensor)
        """Whether it has been seen that its module does not write to it unsaid."""
        self._version = 0
        """The parameter's version when the pending copy began."""
        self._copies = copies
        self._event: Any = None
        with torch.inference_mode(False), plain_execution(FETCH):
            self._host, self._away = _on_host(parameter.data, lock)  # the same memory
        parameter.data = self._away

    @property
    def version(self) -> int:
        """The parameter's version."""
        parameter = self._parameter()
        return 0 if parameter is None else version_of(parameter)

    def put(self, data: Tensor | None = None) -> None:
        """The parameter is this from now on; by default what is on the host."""
        parameter = self._parameter()
        if parameter is not None:
            parameter.data = self._away if data is None else data

    def keep(self, block: Tensor) -> None:
        """The parameter stays on the device, on `block`; so does what was saved of it."""
        self._kept = block
        self.put(block)

    def is_away(self) -> bool:
        """Whether the parameter is what this made of it: no other data have been put there."""
        parameter = self._parameter()
        return parameter is not None and share_storage(parameter, self._away)

    def refuse_if_written(self, version: int, size: tuple[int, ...]) -> None:
        """Raises RuntimeError where the parameter is no longer of a version."""
        parameter = self._parameter()
        if parameter is not None and version_of(parameter) != version:
            raise modified_error(parameter, version, size)

    def fetch(self) -> None:
        """Begin to copy it to the device. The current stream is the one that will use it."""
        self._version = self.version
        with torch.inference_mode(False):
            self.pending = self._block()

    def _block(self) -> Tensor:
        like = self._away
        if isinstance(like, FakeTensor):
            return _fetched_in_capture(like)
        with plain_execution(FETCH):
            block = torch.empty_strided(
                like.size(), like.stride(), dtype=like.dtype, device=like.device
            )
            streams.wait(self._copies, streams.record(streams.current(like.device)))
            with streams.on(self._copies):
                block.copy_(self._host, non_blocking=True)
            self._event = streams.record(self._copies)
        return block

    def take(self) -> Tensor:
        """The weight on the device, for the current stream to read from here on."""
        if self._kept is not None:
            return self._kept
        if self.pending is None or self._version != self.version:
            self.drop()
            self.fetch()
        streams.wait(streams.current(self._away.device), self._event)
        block, self.pending = self.pending, None
        assert block is not None
        return block

    def drop(self) -> None:
        """A copy that is not needed; its memory may be used again once it has arrived."""
        if self.pending is not None:
            streams.wait(streams.current(self._away.device), self._event)
            self.pending = None


class Saved:
    """Stands for a weight that autograd saves, or a view of it."""

    __slots__ = ("_version", "_view", "weight")

    def __init__(self, tensor: Tensor, weight: Weight) -> None:
        self.weight = weight
        self._view = View.of(tensor, Value(None, 0))
        self._version = weight.version

    def on(self, block: Tensor) -> Tensor:
        """Raises RuntimeError, as autograd itself would, where the weight was modified in place."""
        self.weight.refuse_if_written(self._version, self._view.size)
        with torch.no_grad():
            return self._view.on(block)


class _Mapped:
    """Page-locked memory as CUDA's array protocol describes it, which any card can reach."""

    def __init__(self, host: Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.numel(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def _on_host(data: Tensor, lock: PageLock) -> tuple[Tensor, Tensor]:
    """The content of a tensor in memory of the host, as a tensor of the host and as one of the
    tensor's device; for a fake one the latter has no memory. Raises RefusedError."""
    nbytes = data.untyped_storage().nbytes()
    if isinstance(data, FakeTensor):
        host = data.new_empty((nbytes,), dtype=torch.uint8, device="cpu")
        lock.lock(host)
        storage = data.untyped_storage()
        storage.resize_(0)
        setattr(storage, ON_HOST, True)
        return host, data
    try:
        host = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        if data.is_cuda and not lock.lock(host):
            raise RefusedError("it does not lock pages")
        mapped = torch.as_tensor(_Mapped(host), device=data.device) if data.is_cuda else host
    except (RuntimeError, MemoryError, OSError) as error:
        raise RefusedError(str(error)) from error
    if mapped.data_ptr() != host.data_ptr():
        raise RefusedError("the card has another address for it")
    host, away = (
        one.view(data.dtype).as_strided(data.size(), data.stride()) for one in (host, mapped)
    )
    host.copy_(data)
    return host, away


def _fetched_in_capture(like: FakeTensor) -> Tensor:
    """What `Weight.fetch` asks for, under a name of its own in the trace."""
    from memplan.capturing import session

    assert session._active is not None
    state = session._active.state
    with state.lock:
        state.begin_host_op(FETCH, sys._getframe(1))
        made: FakeTensor = state.fake_mode.dispatch(
            torch.ops.aten.empty_strided.default,
            (),
            (like.size(), like.stride()),
            {"dtype": like.dtype, "device": like.fake_device},
        )
        number = state.recorder.track(
            made, state.device_number(made.fake_device), role=Role.PARAMETER
        )
        builder = state.recorder.builder
        builder.op_work(flops=0, moved_bytes=like.numel() * like.element_size())
        builder.op_writes([number])
    return made
