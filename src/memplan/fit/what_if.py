"""What a job would need if it were spread over more GPUs: a trace, changed, estimated again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memplan.types.trace import I64, Role, Trace


def shard_optimizer(trace: Trace, gpus: int) -> Trace:
    """The trace of one of `gpus` processes that share the optimizer's state evenly (ZeRO, stage 1;
    Rajbhandari et al., 2020).

    Storages of the optimizer's state have their bytes divided, rounded up. Everything else stays:
    gradients, the temporaries of the optimizer's update (which would shrink) and the buffers of
    the collectives (which would come on top).
    """
    if gpus < 1:
        raise ValueError(f"{gpus} GPUs")
    events = trace.events
    named = events.storage >= 0
    state = np.zeros(len(events), bool)
    state[named] = trace.storages.role[events.storage[named]] == Role.OPTIMIZER_STATE
    return replace(
        trace,
        events=replace(
            events,
            bytes=_divided(events.bytes, state, gpus),
            bytes_low=_divided(events.bytes_low, state, gpus),
            bytes_high=_divided(events.bytes_high, state, gpus),
        ),
        _cache={},
    )


def _divided(nbytes: I64, rows: npt.NDArray[np.bool_], parts: int) -> I64:
    return np.asarray(np.where(rows, -(-nbytes // parts), nbytes), np.int64)
