"""Modules and losses, and what puts them into models of transformers."""

from __future__ import annotations

from .layers import (
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerRMSNorm,
    LigerSwiGLUMLP,
    liger_rotary_pos_emb,
)
from .monkey_patch import (
    AutoLigerKernelForCausalLM,
    _apply_liger_kernel,
    _apply_liger_kernel_to_instance,
    apply_liger_kernel_to_llama,
    apply_liger_kernel_to_mistral,
    apply_liger_kernel_to_qwen2,
    apply_liger_kernel_to_qwen3,
)

__all__ = [
    "AutoLigerKernelForCausalLM",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerRMSNorm",
    "LigerSwiGLUMLP",
    "_apply_liger_kernel",
    "_apply_liger_kernel_to_instance",
    "apply_liger_kernel_to_llama",
    "apply_liger_kernel_to_mistral",
    "apply_liger_kernel_to_qwen2",
    "apply_liger_kernel_to_qwen3",
    "liger_rotary_pos_emb",
]
