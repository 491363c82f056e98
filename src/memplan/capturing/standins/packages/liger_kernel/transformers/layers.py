"""Liger's modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import functions


class LigerRMSNorm(nn.Module):
    """Root-mean-square normalisation."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functions.rms_norm(hidden_states, self.weight, self.casting_mode)
        return made


class LigerSwiGLUMLP(nn.Module):
    """The gated feed-forward of Llama and its kin."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        inner = intermediate_size or config.intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = functions.silu_mul(self.gate_proj(x), self.up_proj(x))
        made: torch.Tensor = self.down_proj(product)
        return made


def liger_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, in place."""
    made: tuple[torch.Tensor, torch.Tensor] = functions.rope(q, k, cos, sin)
    return made


class LigerCrossEntropyLoss(nn.Module):
    """Over logits that exist already."""

    def __init__(self, ignore_index: int = -100, reduction: str = "mean", **_more: Any) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = reduction

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functions.cross_entropy(_input, target, self.reduction)
        return made


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Over hidden states and the weight of the output layer: logits are never whole."""

    def __init__(
        self,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        **_more: Any,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.accum_dtype = accum_dtype

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        made: torch.Tensor = functions.fused_linear_cross_entropy(
            _input, lin_weight, target, bias, self.accum_dtype, self.reduction
        )
        return made
