"""Seconds of a trace's operators on a card.

A kernel takes as long as its operations or its traffic, whichever is longer, with a smooth turn
between the two (Williams, Waterman, Patterson: Roofline, CACM 2009, with ceilings by class), and a
constant from one kernel's end to the next one's. Views cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memplan.timing.table import KernelTimes, kernel_times
from memplan.timing.workload import Workload, workload
from memplan.types.device import DeviceProfile
from memplan.types.op_names import FETCH, STATE_TO_CARD, STATE_TO_HOST
from memplan.types.step_graph import F64, Bools
from memplan.types.trace import Trace

SHARPNESS = 4
"""Exponent of the norm that joins arithmetic and traffic: at a tie a kernel takes 19 % longer."""
IN_L2 = 2 / 3
"""Share of the L2 cache up to which a kernel's data is taken to be in it."""
_RATES = {
    "float16": ("fp16",),
    "bfloat16": ("bf16", "fp16"),
    "tf32": ("tf32",),
    "float8_e4m3fn": ("fp8", "fp16"),
    "float8_e5m2": ("fp8", "fp16"),
    "float64": ("fp64", "fp32"),
}
"""For each dtype, the rates of a profile to look for in order; all others run at fp32."""


def op_seconds(
    trace: Trace, profile: DeviceProfile, start: int = 0, stop: int | None = None
) -> F64:
    """Expected seconds of the operators `[start, stop)` on the card, one by one.

    Operators whose traffic is unknown move their storages whole.
    """
    work = workload(trace, profile.sm_count, start, stop)
    seconds = by_operator(work, kernel_seconds(work, profile, kernel_times()))
    rows = slice(start, stop)
    seconds = np.where(fetches(trace)[rows], over_link(trace, profile)[rows], seconds)
    return np.where(moves_state(trace)[rows], 0.0, seconds)


def over_link(trace: Trace, profile: DeviceProfile) -> F64:
    """Seconds of operators whose bytes come from the host or go there."""
    return trace.ops.moved_bytes / profile.host_link_bytes_per_second


def fetches(trace: Trace) -> Bools:
    """Operators that copy a weight from the host to the card, which the link bounds."""
    return np.array([text == FETCH for text in trace.strings], bool)[trace.ops.name]


def moves_state(trace: Trace) -> Bools:
    """Operators that copy optimizers' state between the host and the card, beside the kernels."""
    names = (STATE_TO_CARD, STATE_TO_HOST)
    return np.array([text in names for text in trace.strings], bool)[trace.ops.name]


def by_operator(work: Workload, each: F64) -> F64:
    """The sum of each operator's kernel times."""
    count = len(work.first) - 1
    owner = np.repeat(np.arange(count), np.diff(work.first))
    return np.asarray(np.bincount(owner, each, count)[work.which], np.float64)


def kernel_seconds(work: Workload, profile: DeviceProfile, table: KernelTimes) -> F64:
    """Seconds of each kernel of the workload."""
    reached = [table.on(kind, profile) for kind in work.kind]
    compute = np.array([one.compute for one in reached])
    memory = np.array([one.memory for one in reached])
    cached = work.nbytes <= IN_L2 * profile.l2_bytes
    rate = peak_rates(work.rate, profile)
    return joined(
        work.flops / (rate * compute),
        work.nbytes
        / (profile.memory_bandwidth_bytes_per_second * memory)
        / np.where(cached, table.l2_gain, 1.0),
        table.launch_us * 1e-6,
    )


def joined(arithmetic: F64, traffic: F64, launch: float) -> F64:
    """Seconds of kernels by their arithmetic and their traffic alone."""
    busy = (arithmetic**SHARPNESS + traffic**SHARPNESS) ** (1 / SHARPNESS)
    return np.asarray(busy + launch, np.float64)


def peak_rates(dtypes: Sequence[str], profile: DeviceProfile) -> F64:
    """Peak operations a second for each dtype."""
    known = {dtype: _rate(profile, dtype) for dtype in set(dtypes)}
    return np.array([known[dtype] for dtype in dtypes], np.float64)


def _rate(profile: DeviceProfile, dtype: str) -> float:
    for name in _RATES.get(dtype, ()):
        if name in profile.peak_flops:
            return profile.peak_flops[name]
    return profile.peak_flops["fp32"]
