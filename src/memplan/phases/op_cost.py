"""Expected seconds of operators on a card, by a roofline.

An operator takes as long as its arithmetic or its traffic, whichever is longer (Williams, Waterman,
Patterson: Roofline, CACM 2009), and never less than a kernel's shortest duration. Views cost
nothing. What a card reaches of its data sheet's figures is a constant for each kind of work below.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from memplan.types.device import DeviceProfile
from memplan.types.step_graph import F64
from memplan.types.trace import I64, EventKind, Trace

COMPUTE_EFFICIENCY = 0.6
"""Share of the peak rate that large matrix products, convolutions and attention reach."""
BANDWIDTH_EFFICIENCY = 0.8
"""Share of the memory bandwidth that elementwise kernels and reductions reach."""
SHORTEST_KERNEL_SECONDS = 3e-6
"""Of an eager operator whose tensors are tiny."""

_RATES = {
    "float16": ("fp16",),
    "bfloat16": ("bf16", "fp16"),
    "float8_e4m3fn": ("fp16",),
    "float8_e5m2": ("fp16",),
    "float64": ("fp64", "fp32"),
}
"""By dtype: the rates of a profile to look for, in this order; every other dtype runs at fp32."""


def op_seconds(
    trace: Trace, profile: DeviceProfile, start: int = 0, stop: int | None = None
) -> F64:
    """Expected seconds of the operators `[start, stop)` on the card, one by one.

    Products in float32 run at the fp32 rate, convolutions in float32 at the tf32 rate where the
    card has one: PyTorch's defaults. Operators whose traffic is unknown move their storages whole.
    """
    ops = trace.ops
    rows = slice(start, len(ops) if stop is None else stop)
    flops, moved = ops.flops[rows], ops.moved_bytes[rows]
    if (moved < 0).any():
        moved = np.where(moved < 0, _whole_storages(trace)[rows], moved)
    arithmetic = flops / (_rates(trace, profile, rows) * COMPUTE_EFFICIENCY)
    traffic = moved / (profile.memory_bandwidth_bytes_per_second * BANDWIDTH_EFFICIENCY)
    busy = np.maximum(np.maximum(arithmetic, traffic), SHORTEST_KERNEL_SECONDS)
    return np.where((flops == 0) & (moved == 0), 0.0, busy)


def _rates(trace: Trace, profile: DeviceProfile, rows: slice) -> F64:
    """Peak FLOP/s of each operator, by the dtype of the first storage that it reads."""
    ops = trace.ops
    by_string = np.array([_rate(profile, text, _RATES) for text in trace.strings])
    tf32 = profile.peak_flops.get("tf32", profile.peak_flops["fp32"])
    first = np.minimum(ops.reads_start[:-1], max(len(ops.reads) - 1, 0))[rows]
    reads_any = (ops.reads_start[1:] > ops.reads_start[:-1])[rows]
    fp32 = profile.peak_flops["fp32"]
    if not len(ops.reads):
        return np.full(len(first), fp32)
    rate = np.where(reads_any, by_string[trace.storages.dtype[ops.reads[first]]], fp32)
    convolution = np.array(["convolution" in text for text in trace.strings])[ops.name[rows]]
    return np.where(convolution & (rate == fp32), tf32, rate)


def _rate(profile: DeviceProfile, dtype: str, names: Mapping[str, tuple[str, ...]]) -> float:
    for name in names.get(dtype, ()):
        if name in profile.peak_flops:
            return profile.peak_flops[name]
    return profile.peak_flops["fp32"]


def _whole_storages(trace: Trace) -> I64:
    """By operator: bytes of all storages that it reads and writes."""
    size = storage_bytes(trace)
    ops = trace.ops
    return _row_sums(size[ops.reads], ops.reads_start) + _row_sums(
        size[ops.writes], ops.writes_start
    )


def storage_bytes(trace: Trace) -> I64:
    """Requested bytes of every storage generation; 0 for one that no request was made for."""
    events = trace.events
    size = np.zeros(len(trace.storages), np.int64)
    made = events.kind == EventKind.ALLOC
    size[events.storage[made]] = events.bytes[made]
    return size


def _row_sums(values: I64, starts: npt.NDArray[np.int64]) -> I64:
    total = np.concatenate(([0], np.cumsum(values)))
    return np.asarray(total[starts[1:]] - total[starts[:-1]], np.int64)
