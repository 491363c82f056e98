"""A captured mixture of experts with the loads that a real router would give.

A capture assumes that tokens spread evenly over the experts. Here each expert's share of each
layer's tokens is drawn anew in every step and micro-batch (log-normal, then scaled to the layer's
tokens), and every tensor that it sizes takes that many rows.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from memplan.layout.dynamic import data_roots
from memplan.types.trace import I64, EventKind, Phase, Trace

SPREAD = 0.3
"""Standard deviation of the logarithm of an expert's share."""


def uneven(trace: Trace, seed: int = 0) -> Trace:
    """The same requests with uneven sizes where they depend on a router."""
    roots = data_roots(trace)
    events = trace.events
    made = np.flatnonzero((events.kind == EventKind.ALLOC) & (roots[events.storage] >= 0))
    own = made[roots[events.storage[made]] == events.storage[made]]
    factor = np.ones(len(trace.storages))
    passes = _passes(trace)
    for rows in _layers(trace, own):
        # The same draw for a layer's forward and for its recomputation in the same pass.
        key = (seed, int(passes[rows[0]]), int(events.module[rows[0]]))
        drawn = np.exp(np.random.default_rng(key).normal(0.0, SPREAD, len(rows)))
        factor[events.storage[rows]] = drawn / drawn.mean()
    at = np.flatnonzero((events.storage >= 0) & (roots[events.storage] >= 0))
    sizes = events.bytes.copy()
    scaled = events.bytes[at] * factor[roots[events.storage[at]]]
    sizes[at] = np.where(events.bytes[at] > 0, np.maximum(scaled.astype(np.int64), 1), 0)
    columns = {field.name: getattr(events, field.name) for field in fields(events)}
    changed = {**columns, "bytes": sizes, "bytes_low": sizes, "bytes_high": sizes}
    return replace(trace, events=type(events)(**changed))


def _layers(trace: Trace, own: I64) -> list[I64]:
    """Roots of one layer in one stretch of a pass, in order."""
    module, phase = trace.events.module[own], trace.events.phase[own]
    changes = np.flatnonzero((module[1:] != module[:-1]) | (phase[1:] != phase[:-1])) + 1
    return [rows for rows in np.split(own, changes) if len(rows)]


def _passes(trace: Trace) -> I64:
    """By event: the number of its pass, a forward with the backward that follows."""
    backward = (trace.events.phase == Phase.BACKWARD).astype(np.int8)
    return np.cumsum(np.diff(backward, prepend=0) == -1)
