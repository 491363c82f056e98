"""What `scaled_dot_product_attention` does around the kernel it chose: padding and mask copies.

Source: pytorch `native/transformers/attention.cpp` (`scaled_dot_product_attention`,
`pad_last_dim`, `preprocess_mask`, `convert_boolean_attn_mask`).
"""

from __future__ import annotations

from dataclasses import dataclass

from memplan.capture.kernels.attention import SdpaCall
from memplan.capture.kernels.model import itemsize, numel, round_up


@dataclass(frozen=True)
class SdpaPlan:
    """What `scaled_dot_product_attention` does around the chosen kernel, in this order."""

    op: str
    """The aten operator to call."""
    mask_to_float: bool
    """A bool mask becomes `where(mask, 0, -inf)` in the query's dtype, shape of the mask."""
    pad_head_to: int
    """Query, key and value are padded (`constant_pad_nd`) to this head size; the output is
    sliced back. Equal to the head size: no padding."""
    pad_mask_by: int
    """Columns added to the mask (a copy), then sliced off again. 0: none."""
    expand_mask: bool
    """The mask is expanded (a view) to (batch, heads, query, key)."""
    compute_log_sumexp: bool


_OPS = {
    "flash": "aten._scaled_dot_product_flash_attention",
    "efficient": "aten._scaled_dot_product_efficient_attention",
    "cudnn": "aten._scaled_dot_product_cudnn_attention",
    "math": "aten._scaled_dot_product_attention_math",
}


def plan_sdpa(call: SdpaCall, kernel: str) -> SdpaPlan:
    """Operator and preparation for a kernel that `choose_sdpa` named. The mask is taken as
    contiguous. Raises KeyError for `none`."""
    head = call.q[-1]
    to_float = call.mask is not None and call.mask.dtype == "bool"
    return SdpaPlan(
        op=_OPS[kernel],
        mask_to_float=to_float,
        pad_head_to=round_up(head, 8) if kernel == "flash" else head,
        pad_mask_by=_mask_padding(call) if kernel == "efficient" else 0,
        expand_mask=kernel == "efficient" and call.mask is not None,
        compute_log_sumexp=call.requires_grad,
    )


def _mask_padding(call: SdpaCall) -> int:
    """16 columns alignment: last size and outer strides must be multiples of 16."""
    if call.mask is None:
        return 0
    last = call.mask.shape[-1]
    if last % 16 == 0 and call.mask.last_stride_one:
        return 0
    return 16 - last % 16


def mask_bytes(call: SdpaCall, plan: SdpaPlan) -> int:
    """Bytes of the mask copies that stay alive for the backward: the padded one, or the float
    one made from bool, or 0 when the caller's own tensor is used."""
    if call.mask is None:
        return 0
    rows = numel(call.mask.shape[:-1])
    dtype = call.dtype if plan.mask_to_float else call.mask.dtype
    columns = call.mask.shape[-1] + plan.pad_mask_by
    return rows * columns * itemsize(dtype) if plan.pad_mask_by or plan.mask_to_float else 0
