"""What a job would need if it were spread over more GPUs: a trace, changed, estimated again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memplan.types.trace import I64, Role, Trace

Mask = npt.NDArray[np.bool_]


def shard_optimizer(trace: Trace, gpus: int) -> Trace:
    """The trace of one of `gpus` processes that share the optimizer's state evenly (ZeRO, stage 1;
    Rajbhandari et al., 2020).

    Storages of the optimizer's state have their bytes divided, rounded up. Everything else stays:
    gradients, the temporaries of the optimizer's update (which would shrink) and the buffers of
    the collectives (which would come on top).
    """
    if gpus < 1:
        raise ValueError(f"{gpus} GPUs")
    return with_less(trace, trace.storages.role == Role.OPTIMIZER_STATE, 1, gpus)


def with_less(trace: Trace, storages: Mask, times: int, parts: int, *, least: int = 0) -> Trace:
    """The trace with the bytes of these storages times `times / parts`, rounded up; of those that
    have `least` bytes or more."""
    events = trace.events
    rows = events.storage >= 0
    rows[rows] = storages[events.storage[rows]]
    rows &= events.bytes >= least
    return replace(
        trace,
        events=replace(
            events,
            bytes=_scaled(events.bytes, rows, times, parts),
            bytes_low=_scaled(events.bytes_low, rows, times, parts),
            bytes_high=_scaled(events.bytes_high, rows, times, parts),
        ),
    )


def _scaled(nbytes: I64, rows: Mask, times: int, parts: int) -> I64:
    return np.asarray(np.where(rows, -(-nbytes * times // parts), nbytes), np.int64)
