"""Storages that are resized: FSDP frees a parameter by resizing its storage to nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memplan.capture.mode import CaptureMode
    from memplan.capture.patches.attributes import Patches


def install(patches: Patches, mode: CaptureMode) -> None:
    """Watch `UntypedStorage.resize_` until `patches.undo()`."""
    resize: Any = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        mode.recorder.flush()
        if storage._cdata not in mode.recorder.live:
            resize(storage, size)
            mode.host.resized(storage)
            return storage
        mode.begin_host_op("storage.resize_", sys._getframe(1))
        resize(storage, size)
        mode.values.forget_storage(storage)
        mode.recorder.resized(storage)
        return storage

    patches.set(torch.UntypedStorage, "resize_", resize_)
