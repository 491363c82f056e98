"""What stands where a gradient was that has been applied and released."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from memplan.runtime.early.too_late import too_late, where

aten = torch.ops.aten
_MOVES = frozenset(
    {aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default}
)
"""Operators that only take a gradient elsewhere, as `module.cpu()` does in the end."""


class AppliedGradient(Tensor):
    """Has the shape of a gradient and no memory. Whatever asks for its values raises
    EarlyUpdateError: it is not None, just as the gradient would not be, and it is never a wrong
    number."""

    @staticmethod
    def __new__(
        cls, like: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Self:
        return Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            dtype=dtype or like.dtype,
            device=device or like.device,
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _MOVES and isinstance(args[0], AppliedGradient):
            return cls(args[0], **{k: v for k, v in (kwargs or {}).items() if k in _KEPT})
        raise too_late(f"{func}{where()} asks for a gradient")

    def _gone(self, *_args: Any, **_kwargs: Any) -> Any:
        raise too_late(f"something outside of PyTorch's operators{where()} asks for a gradient")

    numpy = tolist = data_ptr = __array__ = __dlpack__ = __reduce_ex__ = _gone

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"AppliedGradient({'x'.join(map(str, self.shape))})"


_KEPT = ("dtype", "device")
