"""What stands where a gradient was that has been applied and released, and the error of a job that
needs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from memplan.types.errors import OptimizerInBackwardError

aten = torch.ops.aten
_MOVES = frozenset(
    {aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default}
)
"""Operators that only take a gradient elsewhere, as `module.cpu()` does in the end."""
_CLIPS: dict[Any, Callable[..., tuple[float | None, float | None]]] = {
    aten.clamp_.default: lambda lower=None, upper=None: (lower, upper),
    aten._foreach_clamp_min_.Scalar: lambda lower: (lower, None),
    aten._foreach_clamp_max_.Scalar: lambda upper: (None, upper),
}
"""What `torch.nn.utils.clip_grad_value_` calls, and to what its arguments clip."""
_OURS = str(Path(__file__).parents[2])
_TORCHS = str(Path(torch.__file__).parent)
_NOT_THE_JOBS = (_OURS, _TORCHS, "<")


def too_late(what: str) -> OptimizerInBackwardError:
    """The error for a job that needs what is gone; `what` it does, as a sentence without an end."""
    return OptimizerInBackwardError(
        f"{what}, and the plan has already updated the parameter in the backward pass: going on "
        "would change the job's numbers",
        'run without the plan, or delete its part "order": the job does in a later step what it '
        "did not do in its first",
    )


def where() -> str:
    """` (train.py:12)`: the line of the job that is running; empty in the backward pass."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_JOBS):
            return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class AppliedGradient(Tensor):
    """Has the shape of a gradient and no memory. Whatever asks for its values raises
    OptimizerInBackwardError: it is not None, just as the gradient would not be, and it is never a
    wrong number."""

    @staticmethod
    def __new__(
        cls, like: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Self:
        made = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            dtype=dtype or like.dtype,
            device=device or like.device,
        )
        made.clips = False
        made.lower = made.upper = None
        return made

    clips: bool
    """Whether it has been clipped, which the job does afterwards."""
    lower: float | None
    upper: float | None
    """What the job clips it to."""

    __torch_function__ = torch.nn.Parameter.__torch_function__  # none  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _MOVES and isinstance(args[0], AppliedGradient):
            return cls(args[0], **{k: v for k, v in (kwargs or {}).items() if k in _KEPT})
        if func in _CLIPS:
            several = isinstance(args[0], (list, tuple))
            gradients: Any = args[0] if several else args[:1]
            if all(isinstance(one, AppliedGradient) and one.clips for one in gradients):
                lower, upper = _CLIPS[func](*args[1:], **(kwargs or {}))
                for one in gradients:
                    bounds = [(one.lower, lower), (one.upper, upper)]
                    given = [[b for b in pair if b is not None] for pair in bounds]
                    one.lower, one.upper = max(given[0], default=None), min(given[1], default=None)
                return None if several else args[0]
        raise too_late(f"{func}{where()} asks for a gradient")

    def _gone(self, *_args: Any, **_kwargs: Any) -> Any:
        raise too_late(f"something outside of PyTorch's operators{where()} asks for a gradient")

    numpy = tolist = data_ptr = __array__ = __dlpack__ = __reduce_ex__ = _gone

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"AppliedGradient({'x'.join(map(str, self.shape))})"


_KEPT = ("dtype", "device")
