"""What a job does to storages: they are resized (FSDP frees a parameter by resizing its storage to
nothing), and page-locked, for which there is no driver here."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.state import CaptureState

aten = torch.ops.aten


def install(patches: Patches, state: CaptureState) -> None:
    """Follow both until `patches.undo()`."""
    _follow_sizes(patches, state)
    host = state.host
    if not host.enabled:
        return
    state.observe(aten._to_copy.default, _observe_copy)

    def pin_memory(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        if tensor.is_cuda:
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        if hasattr(tensor, "__tensor_flatten__"):  # a wrapper: what it holds
            for name in tensor.__tensor_flatten__()[0]:
                host.pin(getattr(tensor, name))
            return tensor
        if tensor.layout is not torch.strided or host.is_pinned(tensor):
            return tensor
        if isinstance(tensor, FakeTensor) or _is_part(tensor):
            with torch.no_grad():
                tensor = tensor.clone()
        host.pin(tensor)
        return tensor

    def is_pinned(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> bool:
        if tensor.is_cuda or tensor.layout is not torch.strided:
            return False
        if hasattr(tensor, "__tensor_flatten__"):
            return all(getattr(tensor, name).is_pinned() for name in tensor.__tensor_flatten__()[0])
        return host.is_pinned(tensor)

    patches.set(torch.Tensor, "pin_memory", pin_memory)
    patches.set(torch.Tensor, "is_pinned", is_pinned)


def _follow_sizes(patches: Patches, state: CaptureState) -> None:
    resize: Any = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        state.recorder.flush()
        if storage._cdata not in state.recorder.live:
            resize(storage, size)
            state.host.resized(storage)
            return storage
        state.begin_host_op("storage.resize_", sys._getframe(1))
        resize(storage, size)
        state.values.forget_storage(storage)
        state.recorder.resized(storage)
        return storage

    patches.set(torch.UntypedStorage, "resize_", resize_)


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of something larger, which is not pinned with it."""
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _observe_copy(state: CaptureState, _func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """A copy from the device that the host does not wait for goes to page-locked memory
    (`_to_copy` in aten/src/ATen/native/TensorConversions.cpp)."""
    if kwargs.get("non_blocking") and isinstance(result, FakeTensor):
        source = args[0]
        from_device = (
            isinstance(source, FakeTensor) and source.fake_device.type == state.device_type
        )
        if from_device and result.fake_device.type == "cpu":
            state.host.pin(result)
