"""Lazy modules: the tensors that they make of their first input are fake, wherever moved to."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import parameter as parameter_module

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.state import CaptureState

_DATA = "_memplan_data"


def install(patches: Patches, state: CaptureState) -> None:
    """Patch lazy modules until `patches.undo()`."""
    mixin: Any = vars(parameter_module)["UninitializedTensorMixin"]
    real_data: Any = vars(torch.Tensor)["data"]
    module_apply: Any = torch.nn.Module._apply

    def born(real: Any) -> Any:
        """Stand-in for `__new__`: the tensor itself is real and on the host, whatever its data."""
        takes = inspect.signature(real)

        def new(*args: Any, **kwargs: Any) -> Any:
            given = takes.bind(*args, **kwargs).arguments
            data = torch.empty(0, device=given.get("device"), dtype=given.get("dtype"))
            tensor = real(**{**given, "device": "cpu"})
            setattr(tensor, _DATA, data)
            return tensor

        return staticmethod(new)

    def apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> Any:
        """Uninitialised tensors have nothing to move: they remember where to, and as which type."""
        waiting = [
            (slots, name, tensor)
            for slots in (module._parameters, module._buffers)
            for name, tensor in slots.items()
            if isinstance(tensor, mixin)
        ]
        for slots, name, tensor in waiting:
            setattr(tensor, _DATA, fn(tensor.data))
            slots[name] = None
        try:
            return module_apply(module, fn, recurse)
        finally:
            for slots, name, tensor in waiting:
                slots[name] = tensor

    def data(tensor: Any) -> Any:
        """Of one that was made before the capture, its own."""
        given = vars(tensor).get(_DATA)
        return real_data.__get__(tensor) if given is None else given

    def set_data(tensor: Any, value: Any) -> None:
        real_data.__set__(tensor, value)
        state.belongs_to_module(value)

    for kind in (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer):
        patches.set(kind, "__new__", born(kind.__new__))
    patches.set(mixin, "data", property(data, set_data))
    patches.set(torch.nn.Module, "_apply", apply)
