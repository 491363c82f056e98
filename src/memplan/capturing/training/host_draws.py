"""Random numbers that initialisers draw on the host, drawn although no parameter has data.

The order of a data loader follows from PyTorch's generator as the script has seeded it, and from
how many numbers the model's initialisers have drawn since. Nobody sees those: they are drawn into a
small tensor. How many a call takes does not change when it is made in pieces of a multiple of 16
(`aten/src/ATen/native/cpu/DistributionTemplates.h`), except where a tensor is not contiguous.
`trunc_normal_` draws again what falls outside, so it runs on real numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan.capturing.fake.plain_class import is_fake
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.state import CaptureState

aten = torch.ops.aten

_IN_PIECES = (aten.uniform_.default, aten.normal_.default)
_WHOLE = (
    aten.bernoulli_.float,
    aten.exponential_.default,
    aten.log_normal_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
)
_PIECE = 1 << 16
_MOST = 1 << 30
"""Numbers: a few seconds."""
_MOST_AT_ONCE = 1 << 24


class HostDraws:
    """What a capture's fake tensors on the host would have drawn."""

    def __init__(self) -> None:
        self.missed = False
        """Whether some were not drawn, so that the generator is not as the job has it."""
        self._left = _MOST

    def install(self, patches: Patches, state: CaptureState) -> None:
        for func in (*_IN_PIECES, *_WHOLE):
            state.observe(func, self._draw)
        init: Any = torch.nn.init
        real: Callable[..., torch.Tensor] = init.trunc_normal_

        def trunc_normal_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not is_fake(tensor) or tensor.device.type != "cpu":
                return real(tensor, *args, **kwargs)
            if self._may_draw(tensor.numel(), _MOST_AT_ONCE):
                real(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **kwargs)
            return tensor

        patches.set(init, "trunc_normal_", trunc_normal_)

    def _may_draw(self, count: int, most: int) -> bool:
        if count > min(self._left, most):
            self.missed = True
            return False
        self._left -= count
        return True

    def _draw(self, _state: CaptureState, func: Any, args: Any, kwargs: Any, _result: Any) -> None:
        tensor: torch.Tensor = args[0]
        count = tensor.numel()
        if tensor.device.type != "cpu" or not count:
            return
        pieces = func in _IN_PIECES and tensor.is_contiguous()
        if not self._may_draw(count, _MOST if pieces else _MOST_AT_ONCE):
            return
        while count >= 2 * _PIECE:
            func(torch.empty(_PIECE, dtype=tensor.dtype, device="cpu"), *args[1:], **kwargs)
            count -= _PIECE
        shape, stride = tensor.shape, tensor.stride()
        if count != tensor.numel():
            shape, stride = torch.Size([count]), (1,)
        rest = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu")
        func(rest, *args[1:], **kwargs)
