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

    def empty(like: torch.Tensor, wanted: torch.dtype) -> Any:
        return mode.fake_mode.dispatch(
            aten.empty_strided.default,
            (),
            (tuple(like.size()), tuple(like.stride())),
            {"dtype": wanted, "device": args[0].device},
        )

    stand_ins = [empty(tensor, torch.bfloat16) for tensor in args[:2]]
    named = {name: value for name, value in kwargs.items() if name != "out_dtype"}
    shaped = mode.fake_mode.dispatch(func, (), (*stand_ins, *args[2:]), named)
    builder = mode.recorder.builder
    reads = [mode.number_of(tensor) for tensor in args[:2]]
    builder.begin_op(str(func), reads=reads, stream=mode.recorder.stream)
    result = empty(shaped, kwargs.get("out_dtype") or dtype)
    builder.op_writes([mode.record(result)])
    return result


HANDLERS: dict[Any, Handler] = {aten._grouped_mm.default: grouped_mm}
