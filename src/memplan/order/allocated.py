"""The bytes that PyTorch's allocator hands out when a graph's operators run in an order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memplan.order.evaluate import lifetimes
from memplan.simulate.steady_step import steady_peak
from memplan.types.builder import TraceBuilder
from memplan.types.graph import Graph
from memplan.types.trace import EventKind, Phase, TraceMeta


def allocated_peak(
    graph: Graph, order: npt.ArrayLike, held: Sequence[int], alloc_conf: str = ""
) -> int:
    """The peak of a graph that runs again and again on one GPU, in bytes of whole blocks.

    `peak` gives the same in requested bytes. See `steady_peak` for the replay. `held`: the blocks,
    in bytes, that sum up to the graph's `base_bytes`. Raises ValueError if `order` is no
    permutation.
    """
    builder = TraceBuilder()

    def alloc(nbytes: int) -> int:
        storage = builder.new_storage()
        builder.append(EventKind.ALLOC, storage, nbytes)
        return storage

    builder.phase = Phase.SETUP
    for nbytes in filter(None, held):
        alloc(nbytes)
    builder.phase = Phase.FORWARD
    start, stop = lifetimes(graph, order)
    alive = (stop > start) & (graph.bytes > 0)
    begins, ends = (_by_place(place, alive, len(graph)) for place in (start, stop - 1))
    storages: dict[int, int] = {}
    for place, row in enumerate(np.asarray(order, np.int64).tolist()):
        storages.update({value: alloc(int(graph.bytes[value])) for value in begins[place]})
        if scratch := int(graph.scratch[row]):
            builder.append(EventKind.FREE, alloc(scratch), scratch)
        for value in ends[place]:
            builder.append(EventKind.FREE, storages[value], int(graph.bytes[value]))
    return steady_peak(builder.build(TraceMeta(alloc_conf=alloc_conf)))


def _by_place(
    place: npt.NDArray[np.int64], alive: npt.NDArray[np.bool_], count: int
) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for value in np.flatnonzero(alive).tolist():
        found[place[value]].append(value)
    return found
