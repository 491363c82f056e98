"""Single kernels of a card, each timed alone beside what the time model says of it.

Each case is one call of an operator after a warm-up, priced from its arguments as a trace would
hold them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memplan.capturing.recording.work import Work, describe, moved_bytes
from memplan.types.builder import TraceBuilder
from memplan.types.trace import Trace, TraceMeta

aten = torch.ops.aten
_WARM_UP, _REPEATS = 3, 20
Make = Callable[..., torch.Tensor]
"""A tensor of random numbers of a shape."""
Case = tuple[Any, Callable[[Make], tuple[Any, ...]]]


def _conv(x: torch.Tensor, w: torch.Tensor, groups: int, last: bool) -> tuple[Any, ...]:
    layout = torch.channels_last if last else torch.contiguous_format
    x, w = x.contiguous(memory_format=layout), w.contiguous(memory_format=layout)
    pad = w.shape[2] // 2
    return x, w, None, [1, 1], [pad, pad], [1, 1], False, [0, 0], groups


CASES: dict[str, Case] = {
    "matmul 8192": (aten.mm.default, lambda t: (t(8192, 8192), t(8192, 8192))),
    "matmul 4096x1024x4096": (aten.mm.default, lambda t: (t(4096, 4096), t(4096, 1024))),
    "matmul 512": (aten.mm.default, lambda t: (t(512, 512), t(512, 512))),
    "batched 256": (aten.bmm.default, lambda t: (t(256, 256, 64), t(256, 64, 256))),
    "pointwise": (aten.add.Tensor, lambda t: (t(1 << 26), t(1 << 26))),
    "pointwise in L2": (aten.add.Tensor, lambda t: (t(1 << 18), t(1 << 18))),
    "transpose": (aten.clone.default, lambda t: (t(8192, 8192).t(),)),
    "reduction": (aten.sum.dim_IntList, lambda t: (t(8192, 8192), [0], True)),
    "layer norm": (
        aten.native_layer_norm.default,
        lambda t: (t(16384, 4096), [4096], t(4096), t(4096), 1e-5),
    ),
    "softmax": (aten._softmax.default, lambda t: (t(16384, 4096), -1, False)),
    "conv 3x3 nchw": (
        aten.convolution.default,
        lambda t: _conv(t(64, 128, 56, 56), t(128, 128, 3, 3), 1, False),
    ),
    "conv 3x3 nhwc": (
        aten.convolution.default,
        lambda t: _conv(t(64, 128, 56, 56), t(128, 128, 3, 3), 1, True),
    ),
    "depthwise nhwc": (
        aten.convolution.default,
        lambda t: _conv(t(64, 128, 56, 56), t(128, 1, 3, 3), 128, True),
    ),
    "attention": (
        aten._scaled_dot_product_flash_attention.default,
        lambda t: (t(4, 16, 4096, 128), t(4, 16, 4096, 128), t(4, 16, 4096, 128), 0.0, True),
    ),
}


@dataclass(frozen=True)
class TimedCase:
    name: str
    seconds: float
    """0 where it failed."""
    trace: Trace
    """A trace of the one operator."""
    error: str = ""


def timed_cases(make: Make, clock: Callable[[Any, tuple[Any, ...]], float]) -> list[TimedCase]:
    """All of them. `clock` gives the seconds of an operator on its arguments."""
    found = []
    for name, (func, arguments) in CASES.items():
        try:
            args = arguments(make)
            found.append(TimedCase(name, clock(func, args), called(func, args, func(*args))))
        except (RuntimeError, NotImplementedError) as error:
            nothing = TraceBuilder().build(TraceMeta())
            found.append(TimedCase(name, 0.0, nothing, str(error)[:500]))
    return found


def called(func: Any, args: tuple[Any, ...], result: Any) -> Trace:
    """A call of an operator, as a capture records its work."""
    inputs = [item for item in args if isinstance(item, torch.Tensor)]
    results = result if isinstance(result, (tuple, list)) else [result]
    made = [item for item in results if isinstance(item, torch.Tensor)]
    builder = TraceBuilder()
    builder.begin_op(str(func))
    flops = Work().flops(func, args, {}, result)
    builder.op_work(
        flops=flops,
        moved_bytes=moved_bytes(func, args, inputs, made, []),
        operands=describe(func, args, flops),
    )
    return builder.build(TraceMeta())


def on_the_card(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def card_seconds(func: Any, args: tuple[Any, ...]) -> float:
    """The median seconds of several calls on the current GPU."""
    for _ in range(_WARM_UP):
        func(*args)
    return statistics.median(cuda_seconds(lambda: func(*args)) for _ in range(_REPEATS))


def cuda_seconds(step: Callable[[], object]) -> float:
    """Time of a step on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
