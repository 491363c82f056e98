"""`torch.cuda.FloatTensor` and its kind: the tensor types of before `dtype` and `device`.

Scripts still make tensors with them, convert to them and set one as the default. PyTorch refuses
those of CUDA where it was built without, so others stand in their places.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import torch

from memplan.capturing.patches.attributes import Patches


def install(patches: Patches) -> None:
    """Put the types of CUDA in place until `patches.undo()`."""
    for owner in (torch.cuda, torch.cuda.sparse):
        for name, real in [*vars(owner).items()]:
            if isinstance(real, type(torch.FloatTensor)):
                patches.set(owner, name, _stand_in(real))
    set_type, set_device = torch.set_default_tensor_type, torch.set_default_device
    new = torch.Tensor.__new__
    used: list[Any] = []
    """The default type if it is one of CUDA, else None; nothing before there was one."""

    def set_default_tensor_type(t: Any) -> None:
        kind = pkgutil.resolve_name(t) if isinstance(t, str) else t
        on_cuda = isinstance(kind, _Type)
        set_type(getattr(torch, kind._real.__name__) if on_cuda else kind)
        if on_cuda and not used:
            patches.set(torch.Tensor, "__new__", make, new=True)
        if on_cuda or used:
            set_device("cuda" if on_cuda else None)
        used[:] = [kind if on_cuda else None]

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        """`torch.Tensor(…)` makes what the default type would."""
        if cls is torch.Tensor and used[0] is not None:
            return used[0](*args, **kwargs)
        return new(cls, *args, **kwargs)

    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)


class _Type(type):
    """What the stand-ins are, as PyTorch's are `torch.tensortype`."""

    _real: Any

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._real, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        like = torch.empty(0, dtype=cls.dtype, layout=cls.layout, device="cuda")
        made: torch.Tensor = like.new(*args, **kwargs)
        return made


def _stand_in(real: Any) -> type:
    # `Tensor.type` goes by the name that a class has in C, that of a class of Python's its own.
    return _Type(str(real)[len("<class '") : -len("'>")], (), {"_real": real, "__module__": None})
