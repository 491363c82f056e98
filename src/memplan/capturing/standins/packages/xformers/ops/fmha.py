"""`memory_efficient_attention` on (batch, sequence, heads, head size)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel


class AttentionBias:
    """Base of biases that are not tensors."""


class LowerTriangularMask(AttentionBias):
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: Any = None,
) -> torch.Tensor:
    """Flash-attention in half precision without a tensor bias, else the cutlass kernel."""
    if isinstance(attn_bias, AttentionBias) and not isinstance(attn_bias, LowerTriangularMask):
        from memplan.types.errors import CaptureError

        raise CaptureError(
            f"xformers.ops.memory_efficient_attention with {type(attn_bias).__name__} cannot be "
            "captured: its memory is not known",
            "use LowerTriangularMask or a tensor, or memplan.register_rule"
            "('xformers.ops.memory_efficient_attention')",
        )
    causal = isinstance(attn_bias, LowerTriangularMask)
    bias = attn_bias if isinstance(attn_bias, torch.Tensor) else None
    if bias is not None and bias.dim() == 3:
        bias = bias.unflatten(0, (query.shape[0], -1))
    squeeze = query.dim() == 3
    tensors = [t.unsqueeze(2) if squeeze else t for t in (query, key, value)]
    if tensors[0].dim() == 5:  # grouped heads: (batch, sequence, groups, heads, head size)
        tensors = [t.flatten(2, 3) for t in tensors]
    half = query.dtype in (torch.float16, torch.bfloat16)
    kernel = SDPBackend.FLASH_ATTENTION if half and bias is None else SDPBackend.EFFICIENT_ATTENTION
    q, k, v = (t.transpose(1, 2) for t in tensors)
    with sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(q, k, v, bias, p, causal, scale=scale)
    made = out.transpose(1, 2)
    if squeeze:
        return made.squeeze(2)
    return made.reshape(query.shape[:-1] + value.shape[-1:])
