"""Parameters of packages' own classes (`bitsandbytes.nn.Params4bit`), without data.

Such a class makes itself of a tensor by `torch.Tensor._make_subclass`. Of a fake tensor a class
that is both is made, so that its own methods (what quantises it when it is moved) still run.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from memplan.capture.mode import CaptureMode
    from memplan.capture.patching import Patches

_AS_THEY_ARE = (
    torch.nn.Parameter,
    torch.nn.UninitializedParameter,
    torch.nn.parameter.UninitializedBuffer,
)
"""PyTorch's own, which others see to."""


@functools.cache
def _fake_class(cls: type) -> type:
    return type(cls.__name__, (cls, FakeTensor), {"__module__": cls.__module__})


def install(patches: Patches, mode: CaptureMode) -> None:
    """Patch `Tensor._make_subclass` until `patches.undo()`."""
    make_subclass = torch.Tensor._make_subclass

    def make(cls: Any, data: Any, require_grad: bool = False, **options: Any) -> Any:
        if cls in _AS_THEY_ARE or not issubclass(cls, torch.nn.Parameter):
            return make_subclass(cls, data, require_grad, **options)
        if not isinstance(data, FakeTensor):
            if data.device.type != "cpu" or data.layout is not torch.strided:
                return make_subclass(cls, data, require_grad, **options)
            data = mode.fakify(data)
        made = data.detach()
        made.__class__ = _fake_class(cls)
        made._is_param = True
        return made.requires_grad_(require_grad)

    patches.set(torch.Tensor, "_make_subclass", staticmethod(make))
