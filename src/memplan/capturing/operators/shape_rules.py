"""Operators whose shape rule in PyTorch is stricter than their CUDA kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.operators.data_dependent import boxes_kept
from memplan.capturing.operators.fake import run_fake
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.recording.work import describe, moved_bytes
from memplan.capturing.state import CaptureState, Handler

aten = torch.ops.aten


def grouped_mm(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """The CUDA kernel of `_grouped_mm` also accepts float32 and float16; the rule only bf16."""
    dtype = args[0].dtype
    if dtype == torch.bfloat16:
        return NotImplemented

    stand_ins = [_empty(state, tensor, torch.bfloat16) for tensor in args[:2]]
    named = {name: value for name, value in kwargs.items() if name != "out_dtype"}
    shaped = state.fake_mode.dispatch(func, (), (*stand_ins, *args[2:]), named)
    builder = state.recorder.builder
    state.begin_op(func, args[:2])
    result = _empty(state, shaped, kwargs.get("out_dtype") or dtype)
    builder.op_writes([state.record(result)])
    flops = state.work.flops(func, args, kwargs, result)
    builder.op_work(
        flops=flops,
        moved_bytes=moved_bytes(func, args, args[:2], [result], []),
        operands=describe(func, args, flops),
    )
    return result


def lstm_cell(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """PyTorch's rule wants biases, which the CUDA kernel does without."""
    gates, hidden_gates, state_before, *biases = args
    if any(bias is not None for bias in biases):
        return NotImplemented
    # Not by `run_fake`, which would count it.
    bias = state.fake_mode.dispatch(aten.new_empty.default, (), (gates, [gates.shape[1]]), {})
    return run_fake(state, func, (gates, hidden_gates, state_before, bias, bias), kwargs)


def no_cudnn_ctc(state: CaptureState, func: Any, args: Any, kwargs: Any) -> bool:
    """cuDNN's loss needs 32-bit targets on the host and blank 0 (`native/cudnn/LossCTC.cpp`). Its
    memory is not published, so PyTorch's own kernel is used in its place."""
    return False


def least_squares(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`native/BatchLinearAlgebra.cpp`: on CUDA the driver is `gels`, which returns no rank and no
    singular values. Solution and residuals share one matrix, as high as the higher operand."""
    a, b = args[:2]
    rows, columns = a.shape[-2:]
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    batch = [*torch.broadcast_shapes(a.shape[:-2], b.shape[: -1 if vector else -2])]
    sides = 1 if vector else b.shape[-1]

    def made(*shape: int, **dtype: torch.dtype) -> Any:
        return run_fake(state, aten.new_empty.default, (a, [*shape]), dtype)

    whole = made(*batch, sides, max(rows, columns)).mT
    solution = whole[..., :columns, :]
    residuals = made(*batch, sides) if rows > columns else made(0)
    solution = solution[..., 0] if vector else solution
    result = solution, residuals, made(0, dtype=torch.int64), made(0)
    observer = state.observers.get(func)
    if observer is not None:
        observer(state, func, args, kwargs, result)
    return result


def copy_into_gather(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """FSDP2 also gathers shards that are on the host (loaded by `assign=True`): its kernel copies
    from there, without memory of its own."""
    shards, output = args[0], args[1]
    there = [tensor for tensor in shards if tensor.device == output.device]
    if len(there) == len(shards):
        return NotImplemented
    return run_fake(state, func, (there, *args[1:]), kwargs)


def install(patches: Patches, state: CaptureState) -> None:
    """Until `patches.undo()`, pass lengths to `ctc_loss` as lists, which PyTorch makes of a plain
    tensor; for a tensor subclass it would divide by them on the host."""
    state.rules["fsdp::all_gather_copy_in"] = copy_into_gather  # there once FSDP2 is imported
    state.rules["torchvision::nms"] = boxes_kept
    real: Any = torch.ctc_loss

    def loss(
        log_probs: Any, targets: Any, inputs: Any, lengths: Any, *rest: Any, **named: Any
    ) -> Any:
        lists = [_integers(state, item) for item in (inputs, lengths)]
        return real(log_probs, targets, *lists, *rest, **named)

    patches.set(torch, "ctc_loss", loss)


def _integers(state: CaptureState, lengths: Any) -> list[int]:
    if not isinstance(lengths, torch.Tensor):
        return list(lengths)
    known = state.values.of(lengths) if isinstance(lengths, FakeTensor) else lengths
    if known is None:
        raise state.cannot(
            "ctc_loss",
            "the lengths of its targets are not known",
            "lengths that come from the batch's data are known, whether on the CPU or the GPU",
        )
    numbers: list[int] = known.view(-1).tolist()
    return numbers


def _empty(state: CaptureState, like: torch.Tensor, dtype: torch.dtype) -> Any:
    return state.blank(like.size(), dtype, like.device, like.stride())


HANDLERS: dict[Any, Handler] = {
    aten.linalg_lstsq.default: least_squares,
    aten._grouped_mm.default: grouped_mm,
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._use_cudnn_ctc_loss.default: no_cudnn_ctc,
    aten._use_miopen_ctc_loss.default: no_cudnn_ctc,
}
