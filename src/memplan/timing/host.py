"""What the host takes to launch a trace's operators: Python, PyTorch's dispatcher and autograd."""

from __future__ import annotations

import numpy as np

from memplan.timing.table import HostTime
from memplan.types.step_graph import F64
from memplan.types.trace import Phase, Trace


def host_seconds(trace: Trace, times: HostTime, start: int, stop: int) -> F64:
    """Host seconds of each operator in `[start, stop)`: less for views, without a kernel."""
    ops = trace.ops
    phase = ops.phase[start:stop]
    launches = (ops.moved_bytes[start:stop] != 0) | (ops.flops[start:stop] != 0)
    by_phase = np.select(
        [phase == Phase.BACKWARD, phase == Phase.FORWARD],
        [times.backward_us, times.forward_us],
        times.optimizer_us,
    )
    return np.asarray(np.where(launches, by_phase, times.view_us) * 1e-6, np.float64)
