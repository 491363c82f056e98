"""The lever for large vocabularies: logits a chunk of rows at a time. It changes rounding."""

from __future__ import annotations

import numpy as np

from memplan.fit.answer import Lever
from memplan.fit.state import State
from memplan.types.plan import LossHead, LossPart
from memplan.types.trace import Role, Trace

_CHUNK_BYTES = 256 << 20
"""Of a chunk of logits in float32."""
_CHUNK_SHARE, _LARGE_SHARE = 1 / 64, 1 / 16
"""The most bytes of a chunk as a share of the card's: a few such tensors exist at once."""
_LEAST_ROWS, _ENOUGH_ROWS = 256, 1024
"""Each chunk reads the head's weight and adds to its gradient. At 256 rows that takes about as long
as the products, since a card computes some 200 FLOPs in the time of a byte; at 1,024 a quarter."""


def with_loss_in_chunks(state: State) -> State:
    """The job with its logits in chunks that add little time; as it is where no logits are worth
    it."""
    heads = heads_of(state.captured.trace)
    if not heads:
        return state
    large = min(_ENOUGH_ROWS, _rows(state, heads, _LARGE_SHARE))
    return _in_chunks(state, heads, max(_few_rows(state, heads), large))


def with_smaller_chunks(state: State, larger: State, fits: bool) -> State | None:
    """The job with chunks that add more time, where it does not fit with `larger` ones; None where
    there are none."""
    if fits or larger.plan.loss is None:
        return None
    heads = larger.plan.loss.heads
    rows = _few_rows(state, heads)
    found = _in_chunks(state, heads, rows) if rows < larger.plan.loss.rows else state
    return found if found.plan.loss is not None else None


def _few_rows(state: State, heads: list[LossHead]) -> int:
    return max(_rows(state, heads, _CHUNK_SHARE), _LEAST_ROWS)


def _rows(state: State, heads: list[LossHead], share: float) -> int:
    most = min(_CHUNK_BYTES, int(share * state.job.profile.total_memory_bytes))
    return most // (4 * max(head.classes for head in heads))


def _in_chunks(state: State, heads: list[LossHead], rows: int) -> State:
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
