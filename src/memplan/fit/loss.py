"""The lever for large vocabularies: logits a chunk of rows at a time. It changes rounding."""

from __future__ import annotations

import numpy as np

from memplan.fit.answer import Lever
from memplan.fit.state import State
from memplan.types.plan import LossHead, LossPart
from memplan.types.trace import Role, Trace

_CHUNK_BYTES = 256 << 20
"""The most bytes of a chunk of logits in float32."""
_CHUNK_SHARE = 1 / 64
"""The most bytes of a chunk as a share of the card's: a few such tensors exist at once."""
_LEAST_ROWS = 256
"""A product of fewer rows keeps a card from its rate."""


def with_loss_in_chunks(state: State) -> State:
    """The job with its logits in chunks; as it is where no logits are worth it."""
    heads = heads_of(state.captured.trace)
    if not heads:
        return state
    widest = max(head.classes for head in heads)
    share = int(_CHUNK_SHARE * state.job.profile.total_memory_bytes)
    rows = max(min(_CHUNK_BYTES, share) // (4 * widest), _LEAST_ROWS)
    return state.with_tried(
        lambda after: Lever(
            kind="loss",
            name=f"logits in chunks of {rows} rows",
            numbers="rounding",
            added_seconds=max(after.step_seconds() - state.step_seconds(), 0.0),
        ),
        {"loss": LossPart(heads=heads, rows=rows)},
        fails="The loss is not computed in chunks",
    )


def heads_of(trace: Trace) -> list[LossHead]:
    """Weights `[classes, features]` for whose classes something takes a log_softmax."""
    ops = trace.ops
    names = np.array([text.startswith("aten._log_softmax.") for text in trace.strings])
    written = [
        int(storage)
        for row in np.flatnonzero(names[ops.name])
        for storage in ops.writes[ops.writes_start[row] : ops.writes_start[row + 1]]
    ]
    shapes = [trace.strings[shape] for shape in trace.storages.shape[written]]
    classes = {int(shape.rpartition("x")[2]) for shape in shapes if "x" in shape}
    weights = np.flatnonzero(trace.storages.role == Role.PARAMETER)
    pairs = {
        tuple(map(int, text.split("x")))
        for text in (trace.strings[shape] for shape in trace.storages.shape[weights])
        if text.count("x") == 1
    }
    found = (LossHead(classes=pair[0], features=pair[1]) for pair in sorted(pairs))
    return [head for head in found if head.classes in classes]
