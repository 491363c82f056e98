"""Symmetric memory (`torch.distributed._symmetric_memory`): refused, before C++ refuses it."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from memplan.capture.patches.attributes import Patches
from memplan.capture.patches.imports import ImportWatcher
from memplan.types.errors import CaptureError

if TYPE_CHECKING:
    from memplan.capture.state import CaptureState

_MODULE = "torch.distributed._symmetric_memory"
_MAKING = ("empty", "rendezvous", "get_symm_mem_workspace")


def install(patches: Patches, watcher: ImportWatcher, state: CaptureState) -> None:
    """Until `patches.undo()`."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise CaptureError(
            f"{state.source()}: symmetric memory, which lies outside PyTorch's allocator and which "
            "other ranks' GPUs map, cannot be followed",
            "leave it out when estimating: the functional collectives do the same without it",
        )

    def adapt(module: ModuleType) -> None:
        for name in _MAKING:
            if hasattr(module, name):
                patches.set(module, name, refuse)

    watcher.add(_MODULE, adapt)
