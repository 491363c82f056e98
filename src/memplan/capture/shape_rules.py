"""Operators whose shape rule in PyTorch is stricter than their CUDA kernel."""

from __future__ import annotations

from typing import Any

import torch

from memplan.capture.mode import CaptureMode, Handler

aten = torch.ops.aten


def grouped_mm(mode: CaptureMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The CUDA kernel of `_grouped_mm` takes float32 and float16 too; the shape rule only bf16."""
    dtype = args[0].dtype
    if dtype == torch.bfloat16:
        return NotImplemented

    stand_ins = [_empty(mode, tensor, torch.bfloat16) for tensor in args[:2]]
    named = {name: value for name, value in kwargs.items() if name != "out_dtype"}
    shaped = mode.fake_mode.dispatch(func, (), (*stand_ins, *args[2:]), named)
    builder = mode.recorder.builder
    reads = [mode.number_of(tensor) for tensor in args[:2]]
    builder.begin_op(str(func), reads=reads, stream=mode.recorder.stream)
    result = _empty(mode, shaped, kwargs.get("out_dtype") or dtype)
    builder.op_writes([mode.record(result)])
    return result


def gru_cell(mode: CaptureMode, func: Any, args: Any, kwargs: Any) -> Any:
    """`native/cuda/RNN.cu`: the new state, and five values a hidden unit for the backward."""
    hx = args[2]
    state = mode.fake(aten.empty_like.default, (hx,), {})
    workspace = mode.fake(aten.new_empty.default, (hx, [hx.shape[0], 5 * hx.shape[1]]), {})
    return state, workspace


def gru_cell_backward(mode: CaptureMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Gradients of both gates, of the state, and of the biases as sums of the gates' gradients."""
    grad, workspace, has_bias = args
    rows, units = workspace.shape[0], workspace.shape[1] // 5
    gates = [
        mode.fake(aten.new_empty.default, (workspace, [rows, 3 * units]), {}) for _ in range(2)
    ]
    state = mode.fake(aten.empty_like.default, (grad,), {})
    biases = [
        mode.fake(aten.sum.dim_IntList, (gate, [0]), {}) if has_bias else None for gate in gates
    ]
    return (*gates, state, *biases)


def no_cudnn_ctc(mode: CaptureMode, func: Any, args: Any, kwargs: Any) -> bool:
    """cuDNN's loss wants 32-bit targets on the host and blank 0 (`native/cudnn/LossCTC.cpp`); what
    it takes is not public, so PyTorch's own kernel stands for it."""
    return False


def _empty(mode: CaptureMode, like: torch.Tensor, dtype: torch.dtype) -> Any:
    return mode.fake_mode.dispatch(
        aten.empty_strided.default,
        (),
        (tuple(like.size()), tuple(like.stride())),
        {"dtype": dtype, "device": like.device},
    )


HANDLERS: dict[Any, Handler] = {
    aten._grouped_mm.default: grouped_mm,
    aten._use_cudnn_ctc_loss.default: no_cudnn_ctc,
    aten._use_cudnn_ctc_loss.Tensor: no_cudnn_ctc,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
}
