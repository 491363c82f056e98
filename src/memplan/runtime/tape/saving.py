"""What autograd saves of a recorded forward pass: the tensor, or what stands for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memplan.runtime.tape.groups import Handle, SavedTensor, SavedWrapper, checksum_of
from memplan.runtime.tape.offload import AwayHandle, Pass
from memplan.runtime.tape.replayable import is_comparable
from memplan.runtime.tape.storages import alias, is_plain
from memplan.runtime.tape.values import Value, View, version_of

if TYPE_CHECKING:
    from memplan.runtime.tape.recording import Recording

Saved = Handle | AwayHandle | SavedTensor | SavedWrapper


def saved(tensor: torch.Tensor, recording: Recording) -> Saved:
    """What autograd keeps in place of a tensor of the forward pass that `recording` is of."""
    if not is_plain(tensor):
        return _saved_wrapper(tensor, recording)
    if recording.of_pass is not None:
        place = recording.storages.place_of(tensor)
        if place is not None and (sent := _send(tensor, place, recording.of_pass, recording)):
            return sent
    value = recording.storages.find(tensor)
    if value is not None and value.base is None:
        known = value.producer is not None and not value.uninitialised
        if value.group is not None and known and not recording.on_another_stream():
            assert value.producer is not None
            comparable = is_comparable(value.producer.func, value.output, tensor.dtype)
            checksum = _checksum(tensor, recording) if comparable else None
            handle = Handle(View.of(tensor, value), value.group, checksum)
            value.group.handles.add(handle)
            return handle
        recording.storages.keep(value, tensor)
        assert value.base is not None
        return SavedTensor(value.base, value.version)
    return as_it_is(tensor)


def _saved_wrapper(tensor: torch.Tensor, recording: Recording) -> SavedWrapper | SavedTensor:
    """A wrapper whose tensors may be dropped or offloaded. The result of a collective is kept,
    because it may not have arrived, and so is a nested tensor, whose sizes depend on a tensor of
    offsets."""
    if (
        not is_traceable_wrapper_subclass(tensor)
        or tensor.is_nested
        or hasattr(tensor, "trigger_wait")
    ):
        return as_it_is(tensor)
    names, context = tensor.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}  # tensors, and a mesh of devices
    instead = {n: saved(one, recording) for n, one in held.items() if isinstance(one, torch.Tensor)}
    if tensor.is_leaf or all(isinstance(one, SavedTensor) for one in instead.values()):
        return as_it_is(tensor)
    return SavedWrapper(tensor, context, held, instead)


def _send(
    tensor: torch.Tensor, place: int, of_pass: Pass, recording: Recording
) -> AwayHandle | None:
    """None: it stays on the card."""
    seen = tensor if tensor._base is None else tensor._base
    if recording.on_another_stream() or isinstance(seen, torch.nn.Parameter):
        return None
    value = recording.storages.find(tensor) or Value(None, 0)
    if value.away is None:
        if value.base is None:
            recording.storages.keep(value, tensor)
        if not of_pass.send(value, place):
            return None
    assert value.away is not None
    return AwayHandle(View.of(tensor, value), value.away, _checksum(tensor, recording))


def _checksum(tensor: torch.Tensor, recording: Recording) -> torch.Tensor | None:
    if not recording.verify or recording.symbolic:
        return None
    with recording.pause_recording(), torch.no_grad():
        return checksum_of(tensor.detach())


def as_it_is(tensor: torch.Tensor) -> SavedTensor:
    """The tensor itself, and the check that nobody writes to it."""
    return SavedTensor(tensor if tensor.is_leaf else alias(tensor), version_of(tensor))
