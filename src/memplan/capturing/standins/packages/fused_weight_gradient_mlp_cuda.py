"""Stand-in for Apex's weight gradients that are added to a buffer: nothing is allocated.

Source: NVIDIA/apex, `csrc/megatron/fused_weight_gradient_dense.cpp`; the workspace of cuBLAS is
PyTorch's own.
"""

from __future__ import annotations

import torch

from memplan.capturing.standins.extension_names import Extension
from memplan.capturing.standins.launch import record
from memplan.capturing.standins.rules import Call

_rule = Extension(
    "fused_weight_gradient_mlp_cuda", "NVIDIA/apex, csrc/megatron/fused_weight_gradient_dense.cpp"
)


def _accumulate(call: Call, x: torch.Tensor, grad: torch.Tensor, weight_grad: torch.Tensor) -> None:
    record("apex.wgrad_gemm_accum", [x, grad, weight_grad], [weight_grad])


wgrad_gemm_accum_fp32 = _rule.named("wgrad_gemm_accum_fp32", _accumulate)
wgrad_gemm_accum_fp16 = _rule.named("wgrad_gemm_accum_fp16", _accumulate)
