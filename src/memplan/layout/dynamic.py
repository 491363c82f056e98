"""Finds requests whose size depends on data, so that a later step may ask for another size.

There are two signs. One is that the next step does not repeat the request. The other is its
operator: the output size of some operators depends on values (`nonzero`, as for routing to experts
and masks), and other operators read such an output and keep its leading dimension. The second sign
is needed because a capture assumes these values, so that sizes are the same in each of its steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memplan.types.trace import I64, EventKind, Trace

Bools = npt.NDArray[np.bool_]

_ROOTS = (
    "aten.nonzero", "aten.masked_select", "aten._unique", "aten.unique", "aten.repeat_interleave",
    "aten.bincount",
)  # fmt: skip
_RESYNC = 6
"""After so many equal requests in a row, two steps are taken to be aligned again."""
_WINDOW = 4096
"""Number of requests within which an alignment is searched for."""


def data_dependent(trace: Trace) -> Bools:
    """Whether the size of each storage depends on data, by the operators that made it."""
    depends: Bools = data_roots(trace) >= 0
    return depends


def data_roots(trace: Trace) -> I64:
    """For each storage the storage, made by an operator such as `nonzero`, whose length is its
    leading dimension; else -1."""
    roots = np.full(len(trace.storages), -1, np.int64)
    names = [trace.strings[number] for number in np.unique(trace.ops.name).tolist()]
    if not any(name.startswith(_ROOTS) for name in names):
        return roots
    leading = _leading(trace)
    root_of = {storage: storage for storage in _own_roots(trace).tolist()}
    ops = trace.ops
    reads_start, writes_start = ops.reads_start.tolist(), ops.writes_start.tolist()
    reads, writes = ops.reads.tolist(), ops.writes.tolist()
    dependent = root_of.keys()
    for row in range(len(ops)):
        read = reads[reads_start[row] : reads_start[row + 1]]
        if dependent.isdisjoint(read):
            continue
        depends = {leading[storage]: root_of[storage] for storage in read if storage in root_of}
        for storage in writes[writes_start[row] : writes_start[row + 1]]:
            if leading[storage] in depends and leading[storage] > 1:
                root_of.setdefault(storage, depends[leading[storage]])
    roots[list(root_of)] = list(root_of.values())
    return roots


def _own_roots(trace: Trace) -> I64:
    root = np.array([text.startswith(_ROOTS) for text in trace.strings])
    events = trace.events
    made = np.flatnonzero((events.kind == EventKind.ALLOC) & (events.op >= 0))
    made = made[root[trace.ops.name[events.op[made]]]]
    storage: I64 = events.storage[made]
    return storage


def _leading(trace: Trace) -> list[int]:
    """The first dimension of each storage's shape; -1 for scalars and unknown shapes."""
    shapes, which = np.unique(trace.storages.shape, return_inverse=True)
    texts = [trace.strings[number] for number in shapes.tolist()]
    numbers = [int(text.split("x", 1)[0]) if text[:1].isdigit() else -1 for text in texts]
    leading: list[int] = np.array(numbers, np.int64)[which].tolist()
    return leading


def matched(left: I64, right: I64) -> Bools:
    """Which items of `left` recur in `right` in the same order. The comparison is greedy: after a
    difference it goes on where some items in a row are equal again."""
    found = np.zeros(len(left), np.bool_)
    i = j = 0
    while i < len(left) and j < len(right):
        length = min(len(left) - i, len(right) - j)
        differs = left[i : i + length] != right[j : j + length]
        run = int(differs.argmax()) if differs.any() else length
        found[i : i + run] = True
        i, j = i + run, j + run
        if run == length:
            break
        step = _next_place(left[i : i + _WINDOW], right[j : j + _WINDOW])
        if step is None:
            i, j = i + _WINDOW // 2, j + _WINDOW // 2
        else:
            i, j = i + step[0], j + step[1]
    return found


def _next_place(left: I64, right: I64) -> tuple[int, int] | None:
    """The nearest places from which some items in a row are equal in both."""
    later: dict[tuple[int, ...], int] = {}
    for at, run in enumerate(_runs(right)):
        later.setdefault(run, at)
    places = ((at, later[run]) for at, run in enumerate(_runs(left)) if run in later)
    return min(places, key=lambda place: place[0] + place[1], default=None)


def _runs(items: I64) -> list[tuple[int, ...]]:
    values = items.tolist()
    return list(zip(*(values[shift:] for shift in range(_RESYNC)), strict=False))
