"""Which operators of a pass can run again, and which values autograd alone holds until backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.phases.pass_values import PassValues
from memplan.types.op_names import (
    CHANGES_STORAGE,
    FETCH,
    HIDDEN_STATE,
    RACES_ON_CUDA,
    UNINITIALISED,
)
from memplan.types.step_graph import Bools
from memplan.types.trace import I64

SLACK_ROWS = 8
"""A node of autograd lets go of what it saved after its last operator. So many rows may pass
between a value's last read in backward and its release when only that node holds it."""

_NAMESPACES = frozenset({"aten", "prims", "torchvision"})
_NEVER = CHANGES_STORAGE | HIDDEN_STATE | RACES_ON_CUDA


def replayable_rows(names: list[str], call: I64, values: PassValues) -> Bools:
    """Which rows can run again: PyTorch's own operators within a recorded call, but for those that
    read memory which nothing wrote, or give other results each time."""
    able = {name: _is_replayable(name) for name in set(names)}
    replayable = np.array([able[name] for name in names], bool) & (call >= 0)
    raw = {name for name in able if _operator(name)[1] in UNINITIALISED}
    for row in np.flatnonzero(np.isin(names, list(raw))).tolist() if raw else []:
        replayable[row] &= not _read_unwritten(row, values)
    return replayable


def _operator(name: str) -> tuple[str, str]:
    """Namespace and operator of `aten.mm.default`."""
    namespace, _, rest = name.partition(".")
    return namespace, rest.partition(".")[0]


def _is_replayable(name: str) -> bool:
    namespace, operator = _operator(name)
    return (namespace in _NAMESPACES and operator not in _NEVER) or name == FETCH


def _read_unwritten(row: int, values: PassValues) -> bool:
    """Whether a value that `row` makes without content is read by an operator that does not write
    it, before any writes it: a kernel that PyTorch does not see has filled it."""
    for value in values.writes.value[values.writes.row == row].tolist():
        readers = values.reads.row[values.reads.value == value]
        writers = values.writes.row[values.writes.value == value]
        later = writers[writers > row]
        if len(readers) and (not len(later) or readers.min() < later.min()):
            return True
    return False


@dataclass(frozen=True)
class RowFacts:
    """What is known of each row of a pass, of which the first `forward` are the forward's."""

    forward: int
    call: I64
    replayable: Bools
    without_gradients: Bools
    """Run without gradients: by `no_grad`, or as the forward of an `autograd.Function`."""
    again: Bools
    """Run with gradients by backward: the forward of a checkpointed block."""


def kept_between(values: PassValues, rows: RowFacts, released: Bools) -> Bools:
    """Values between modules of FSDP, with which replays have to begin.

    `released`: weights that are let go after their module's forward. They are gathered anew for its
    backward, and operators that read them can run again only then. So what is made from such a
    weight, and read after its release by an operator that may run again, cannot be made again when
    that one needs it.
    """
    if not released.any():
        return released
    can = rows.replayable & (rows.call >= 0)
    last = np.full(len(values), -1, np.int64)
    for edges in (values.reads, values.writes):
        again = (edges.row < rows.forward) & can[edges.row]
        np.maximum.at(last, edges.value[again], edges.row[again])
    until = np.where(released, values.free, len(can)).tolist()  # from then on, none can be made
    last_use, is_weight = last.tolist(), released.tolist()
    every = np.arange(rows.forward)
    reads, writes = values.reads.by_row(every), values.writes.by_row(every)
    for row in np.flatnonzero(can[: rows.forward]).tolist():
        inputs = [*reads[row], *writes[row]]
        ends = [until[v] for v in inputs if is_weight[v] or last_use[v] < until[v]]
        for value in writes[row]:
            until[value] = min([until[value], *ends])
    return np.asarray(~released & (last >= np.array(until, np.int64)), bool)


def droppable_values(values: PassValues, rows: RowFacts) -> Bools:
    """Values that a plan may drop after forward: see `GraphValues.droppable`.

    The trace does not say who holds a value. Autograd's saved tensors alone do when it is gone
    within `SLACK_ROWS` of its last read in backward, or goes in backward and nothing there reads it
    (a node may look at the shape alone of what it saved), and these do not hold:

    - it is an input of a checkpointed block, whose arguments Python holds until it has run again;
    - an operator outside its call reads it in forward, and may have saved it there;
    - it is made without gradients: an `autograd.Function` may hold it in its context;
    - a backward that is differentiated itself goes through its call before, and asks for it.

    Every operator that writes it must be able to run again, in the same call.
    """
    made, forward, call = values.alloc, rows.forward, rows.call
    inside = (made >= 0) & (made < forward) & (values.bytes > 0) & (values.storage >= 0)
    inside &= ~values.outlives & (values.free > forward)
    home = np.where(inside, call[np.clip(made, 0, len(call) - 1)], -1)
    inside &= (home >= 0) & ~rows.without_gradients[np.clip(made, 0, len(call) - 1)]
    writes, reads = values.writes, values.reads
    bad_write = ~rows.replayable[writes.row] | (call[writes.row] != home[writes.value])
    inside[writes.value[bad_write]] = False
    in_forward = reads.row < forward
    bad_read = (in_forward & (call[reads.row] != home[reads.value])) | rows.again[reads.row]
    inside[reads.value[bad_read]] = False
    early = reads.value[in_forward & rows.again[reads.row]]
    inside &= ~np.isin(home, call[made[early[made[early] >= 0]]])
    last = np.full(len(values), -1, np.int64)
    np.maximum.at(last, reads.value[~in_forward], reads.row[~in_forward])
    return np.asarray(inside & ((last < 0) | (values.free <= last + 1 + SLACK_ROWS)), bool)
