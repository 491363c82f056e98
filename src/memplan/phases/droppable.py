"""Which operators of a pass can run again, and which values autograd alone holds until backward."""

from __future__ import annotations

import numpy as np

from memplan.phases.pass_values import PassValues
from memplan.types.step_graph import Bools
from memplan.types.trace import I64

SLACK_ROWS = 12
"""A node of autograd lets go of what it saved after its last operator. So many rows may pass
between a value's last read in backward and its release when only that node holds it."""

_NAMESPACES = frozenset({"aten", "prims", "torchvision"})
_NEVER = frozenset(
    {
        "set_", "resize_", "resize_as_", "_resize_output_", "resize",
        "_cudnn_rnn", "miopen_rnn",
        "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add",
        "index_add_", "index_put", "index_put_", "_index_put_impl_", "put_", "histc", "bincount",
        "cumsum", "kthvalue", "median",
    }
)  # fmt: skip
"""Operators that change a storage's size, keep state that their schema does not show, or give
other bits each time on CUDA (`torch.use_deterministic_algorithms` lists those)."""
_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)


def replayable_rows(names: list[str], call: I64, values: PassValues) -> Bools:
    """Which rows can run again: PyTorch's own operators within a recorded call, but for those that
    read memory which nothing wrote, or give other results each time."""
    able = {name: _is_replayable(name) for name in set(names)}
    replayable = np.array([able[name] for name in names], bool) & (call >= 0)
    raw = {name for name in able if _operator(name)[1] in _UNINITIALISED}
    for row in np.flatnonzero(np.isin(names, list(raw))).tolist() if raw else []:
        replayable[row] &= not _read_unwritten(row, values)
    return replayable


def _operator(name: str) -> tuple[str, str]:
    """Namespace and operator of `aten.mm.default`."""
    namespace, _, rest = name.partition(".")
    return namespace, rest.partition(".")[0]


def _is_replayable(name: str) -> bool:
    namespace, operator = _operator(name)
    return namespace in _NAMESPACES and operator not in _NEVER


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


def droppable_values(
    values: PassValues, call: I64, replayable: Bools, without_gradients: Bools, forward: int
) -> Bools:
    """Values that a plan may drop after forward: see `GraphValues.droppable`.

    The trace does not say who holds a value. Autograd's saved tensors alone do when it is gone
    within `SLACK_ROWS` of its last read in backward. Beyond that it must be made and written in
    one recorded call only, by operators that can run again and ran with gradients (an
    `autograd.Function` runs its forward without, and may hold values on its own), and must not be
    read in forward outside its call, where something else may save it.
    """
    count = len(values)
    rows, made = len(call), values.alloc
    inside = (made >= 0) & (made < forward) & (values.bytes > 0) & (values.storage >= 0)
    inside &= ~values.outlives & (values.free > forward)
    home = np.where(inside, call[np.clip(made, 0, rows - 1)], -1)
    inside &= (home >= 0) & ~without_gradients[np.clip(made, 0, rows - 1)]
    writes, reads = values.writes, values.reads
    bad = ~replayable[writes.row] | (call[writes.row] != home[writes.value])
    inside[writes.value[bad]] = False
    elsewhere = (reads.row < forward) & (call[reads.row] != home[reads.value])
    inside[reads.value[elsewhere]] = False
    last = np.full(count, -1, np.int64)
    backward = reads.row >= forward
    np.maximum.at(last, reads.value[backward], reads.row[backward])
    return np.asarray(inside & (last >= 0) & (values.free <= last + 1 + SLACK_ROWS), bool)
