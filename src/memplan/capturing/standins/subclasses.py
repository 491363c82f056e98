"""Tensors of packages' own classes (`bitsandbytes.nn.Params4bit`), without data.

Such a class makes itself of a tensor by `torch.Tensor._make_subclass` or `as_subclass`, which make
a new Python object for what C++ returns, and refuse one that is there already.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capturing.fake.plain_class import dress, is_fake
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.state import CaptureState

_AS_THEY_ARE = (
    torch.nn.Parameter,
    torch.nn.UninitializedParameter,
    torch.nn.parameter.UninitializedBuffer,
)
"""PyTorch's own, which others see to."""


def install(patches: Patches, state: CaptureState) -> None:
    """Patch `Tensor._make_subclass` and `as_subclass` until `patches.undo()`."""
    make_subclass = torch.Tensor._make_subclass

    def make(cls: Any, data: Any, require_grad: bool = False, **options: Any) -> Any:
        if cls in _AS_THEY_ARE:
            return make_subclass(cls, data, require_grad, **options)
        if not is_fake(data):
            if not issubclass(cls, torch.nn.Parameter):
                return make_subclass(cls, data, require_grad, **options)
            if data.device.type != "cpu" or data.layout is not torch.strided:
                return make_subclass(cls, data, require_grad, **options)
            data = state.fakify(data)
        made = data.detach()
        dress(made, cls)
        return made.requires_grad_(require_grad)

    as_subclass = torch.Tensor.as_subclass

    def made_of(tensor: torch.Tensor, cls: Any) -> Any:
        if not is_fake(tensor):
            return as_subclass(tensor, cls)
        made = torch.ops.aten.alias(tensor)
        dress(made, cls)
        return made

    patches.set(torch.Tensor, "as_subclass", made_of)
    patches.set(torch.Tensor, "_make_subclass", staticmethod(make))
