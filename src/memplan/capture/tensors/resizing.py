"""Storages that are resized: FSDP frees a parameter by resizing its storage to nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memplan.capture.patches.attributes import Patches
    from memplan.capture.state import CaptureState


def install(patches: Patches, state: CaptureState) -> None:
    """Watch `UntypedStorage.resize_` until `patches.undo()`."""
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
