"""Shapes of what operators return, where PyTorch has no rule for them.

Each is a kernel of the `Meta` backend, which PyTorch's fake tensors look for: arguments and results
have shapes and no data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gru_cell(gates: Tensor, hidden_gates: Tensor, hx: Tensor, *biases: Any) -> Any:
    """`native/cuda/RNN.cu`: the new state, and five values a hidden unit for the backward."""
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    """Gradients of both gates, of the state, and of the biases (sums of the gates')."""
    rows, units = workspace.shape[0], workspace.shape[1] // 5
    gates = [workspace.new_empty(rows, 3 * units) for _ in range(2)]
    biases = [gate.sum(0) if has_bias else None for gate in gates]
    return (*gates, torch.empty_like(grad), *biases)


def grid_sampler(x: Tensor, grid: Tensor) -> Tensor:
    """`native/cudnn/GridSampler.cpp`, which `grid_sample(align_corners=True)` takes."""
    return x.new_empty(*x.shape[:2], *grid.shape[1:3])


def grid_sampler_backward(x: Tensor, grid: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both."""
    return x.new_empty(x.shape), grid.new_empty(grid.shape)


# The kernels of SyncBatchNorm (`native/cuda/Normalization.cu`): statistics are a value for each
# channel, of single precision at least.


def batch_norm_stats(x: Tensor, eps: float) -> Any:
    """Mean and inverse deviation."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return tuple(x.new_empty(x.shape[1], dtype=dtype) for _ in range(2))


def batch_norm_gather_stats(x: Tensor, mean: Tensor, *rest: Any) -> Any:
    """Those of all ranks, from a row of each."""
    dtype = torch.promote_types(mean.dtype, torch.float32)
    return tuple(mean.new_empty(mean.shape[-1], dtype=dtype) for _ in range(2))


def like_first(x: Tensor, *rest: Any) -> Any:
    """The output, or the gradient of the input."""
    return torch.empty_like(x)


def batch_norm_backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *wanted: bool
) -> Any:
    """Two sums; the gradients of weight and bias, which are like the weight."""
    channels = mean if weight is None else weight
    wants = ((mean, wanted[0]), (mean, wanted[0]), (channels, wanted[1]), (channels, wanted[2]))
    return tuple(torch.empty_like(like) if want else None for like, want in wants)


def like_second(gradient: Tensor, x: Tensor, *rest: Any) -> Any:
    """The gradient of an input."""
    return torch.empty_like(x)


def fake_quantized(x: Tensor, *rest: Any) -> Any:
    """`native/quantized/FakeQuantPer*.cpp`: the output, and which elements were in range."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def learnt_quantized_backward(gradient: Tensor, x: Tensor, scale: Tensor, *rest: Any) -> Any:
    """Gradients of the input, of its scales and of its zero points."""
    return torch.empty_like(x), *(x.new_empty(scale.shape) for _ in range(2))


_KERNELS = {
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "cudnn_grid_sampler": grid_sampler,
    "cudnn_grid_sampler_backward": grid_sampler_backward,
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_gather_stats": batch_norm_gather_stats,
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats,
    "batch_norm_elemt": like_first,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": like_second,
    "_ctc_loss_backward": like_second,
    "_standard_gamma_grad": like_first,
    "_dirichlet_grad": like_first,
    "multi_margin_loss_backward": like_second,
    "multilabel_margin_loss_backward": like_second,
    "fractional_max_pool3d_backward": like_second,
    "fake_quantize_per_tensor_affine_cachemask": fake_quantized,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": fake_quantized,
    "fake_quantize_per_channel_affine_cachemask": fake_quantized,
    "_fake_quantize_learnable_per_tensor_affine": like_first,
    "_fake_quantize_learnable_per_channel_affine": like_first,
    "_fake_quantize_learnable_per_tensor_affine_backward": learnt_quantized_backward,
    "_fake_quantize_learnable_per_channel_affine_backward": learnt_quantized_backward,
}


def install() -> torch.library.Library:
    """Register those that this PyTorch has no kernel for; the library must stay alive."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        if not getattr(torch.ops.aten, name).default.has_kernel_for_dispatch_key("Meta"):
            library.impl(name, kernel, "Meta")
    return library
