"""Kernels of `bitsandbytes` whose shape rule does not show what they take for themselves.

Source: bitsandbytes 0.50.2, `backends/cuda/ops.py` (`gemm_4bit`, `_dequant_linear_fallback`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from memplan.capturing.standins.rules import Call, Rule, running

if TYPE_CHECKING:
    from memplan.capturing.patches.attributes import Patches

_ROWS_ALWAYS_FUSED, _ROWS_EVER_FUSED = 4, 1536
_FLOAT = 4


def _gemm_4bit(
    call: Call,
    a: torch.Tensor,
    b: torch.Tensor,
    shape: Sequence[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fused for few rows; for more than 1,536 the weight is dequantised in whole first. Between,
    the choice depends on card and shape: a bound."""
    rows = a.numel() // a.shape[-1]
    if rows > _ROWS_ALWAYS_FUSED:
        whole = math.prod(shape) * a.element_size()
        if absmax_8bit is not None:
            whole += 2 * absmax_8bit.numel() * _FLOAT
        call.workspace(whole, low=whole if rows > _ROWS_EVER_FUSED else 0)
    return a.new_empty((*a.shape[:-1], shape[0]))


gemm_4bit = Rule("bitsandbytes::gemm_4bit", _gemm_4bit, "bitsandbytes 0.50.2, backends/cuda/ops.py")

RULES = (gemm_4bit,)


def paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
    """A state of a paged optimizer, in CUDA's unified memory: it moves to the host under pressure,
    and is counted there."""
    state = running()
    if state is None:
        return torch.zeros(shape, dtype=dtype)
    made: Any = state.fake_mode.dispatch(
        torch.ops.aten.empty.memory_format, (), (list(shape),), {"dtype": dtype, "device": "cpu"}
    )
    state.assumptions.add(
        "paged", "states of paged optimizers are in unified memory, and counted on the host"
    )
    made.is_paged = True
    made.page_deviceid = getattr(device, "index", 0)
    tensor: torch.Tensor = made
    return tensor


def adapt_functional(patches: Patches, module: Any) -> None:
    """Adapt an installed bitsandbytes: unified memory would need a driver."""
    patches.set(module, "get_paged", paged)
    patches.set(module, "fill", lambda *_args, **_kwargs: None)
    patches.set(module, "prefetch_tensor", lambda *_args, **_kwargs: None)
