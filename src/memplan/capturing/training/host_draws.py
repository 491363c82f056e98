"""Draws the random numbers that initialisers draw on the host, although parameters have no data.

The order of a data loader depends on PyTorch's generator: on the script's seed, and on how many
numbers the model's initialisers have drawn since. Nobody needs these numbers, so they are drawn
into a small tensor, in pieces. In pieces of a multiple of 16 a call draws as many as in one piece
(`aten/src/ATen/native/cpu/DistributionTemplates.h`), except where a tensor is not contiguous.
`trunc_normal_` draws again for numbers outside its range, so it runs on real numbers. For any other
operator that draws it is only noted that it did not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

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
_MOST = 1 << 29
"""The most numbers drawn: 9 s in float32, 17 s in bfloat16, 54 s in float64 on a busy machine."""
_MOST_AT_ONCE = 1 << 24
_MOST_SPAN_BYTES = 1 << 28
"""The most bytes of a tensor that is not contiguous: one like it is created."""


@cache
def _others_that_draw() -> list[Any]:
    """Operators of PyTorch that draw random numbers and are not replayed here."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            func = getattr(getattr(aten, packet), overload or "default", None)
            if func is not None and torch.Tag.nondeterministic_seeded in func.tags:
                found.append(func)
    drawn = {*_IN_PIECES, *_WHOLE}
    return [func for func in found if func not in drawn]


class HostDraws:
    """Draws what a capture's fake tensors on the host would have drawn."""

    def __init__(self) -> None:
        self.missed = False
        """Whether some numbers were not drawn, so that the generator's state is another."""
        self._left = _MOST

    def install(self, patches: Patches, state: CaptureState) -> None:
        for func in (*_IN_PIECES, *_WHOLE):
            state.observe(func, self._draw)
        for func in _others_that_draw():
            state.observe(func, self._miss)
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
        if self.missed or count > min(self._left, most):
            self.missed = True
            return False
        self._left -= count
        return True

    def _miss(self, _state: CaptureState, _func: Any, args: Any, kwargs: Any, result: Any) -> None:
        # What comes first is where the numbers are drawn; attention on a card also has its seed, a
        # tensor on the host.
        tensors = (
            one for one in pytree.tree_leaves((result, args)) if isinstance(one, torch.Tensor)
        )
        first: Any = next(tensors, None)
        if kwargs.get("generator") is None and is_fake(first) and first.device.type == "cpu":
            self.missed = True

    def _draw(self, _state: CaptureState, func: Any, args: Any, kwargs: Any, _result: Any) -> None:
        tensor: torch.Tensor = args[0]
        count = tensor.numel()
        if tensor.device.type != "cpu" or not count:
            return
        if tensor.untyped_storage().nbytes() > _MOST_SPAN_BYTES and not tensor.is_contiguous():
            self.missed = True
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
