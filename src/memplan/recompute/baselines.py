"""Simple selections. They are among the candidates of `solve`, so that it is never worse.

They are: a checkpoint around every block, segments of equal numbers of blocks (Chen et al., 2016,
with the square root of all; PyTorch's `checkpoint_sequential`, with any number), and dropping
values in the order of bytes per second.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from memplan.recompute.segments import Chain, every_unsaved_input, unsaved_inputs
from memplan.recompute.selection import Selection


def equal_segments(chain: Chain, segments: int) -> Selection:
    """Segments of (nearly) equal numbers of blocks. Values that are made and last used within one
    segment are dropped and replayed together."""
    blocks, values = chain.blocks, chain.graph.values
    bounds = np.linspace(0, len(blocks), max(1, min(segments, len(blocks))) + 1).round().astype(int)
    groups = []
    inputs = unsaved_inputs(chain)
    held = {value for begin in bounds[:-1].tolist() for value in inputs[begin]}
    for begin, end in pairwise(bounds.tolist()):
        crossing = set(blocks[end - 1].outputs)
        later = {v for b in blocks[begin:end] for v in b.outputs if _crosses(chain, v, end)}
        made = {v for b in blocks[begin:end] for v in (*b.drops, *b.outputs)}
        groups.append(frozenset(v for v in made - crossing - later if values.droppable[v]))
    return Selection(tuple(filter(None, groups)), frozenset(held))


def _crosses(chain: Chain, value: int, block: int) -> bool:
    """Whether forward reads a value in a block or later."""
    if block >= len(chain.blocks):
        return False
    ops, forward = chain.graph.ops, chain.graph.forward_ops
    first = int(ops.reads_start[chain.blocks[block].start])
    return bool((ops.reads[first : int(ops.reads_start[forward])] == value).any())


class BytesPerSecond:
    """Drops the first values in the order of bytes per second of the op that makes them. The values
    of a block are one group."""

    def __init__(self, chain: Chain) -> None:
        graph = chain.graph
        values = np.flatnonzero(graph.values.droppable)
        seconds = graph.ops.seconds[graph.values.alloc[values]] + 1e-9
        order = values[np.argsort(-graph.values.bytes[values] / seconds, kind="stable")]
        starts = np.array([block.start for block in chain.blocks])
        self._order = order.tolist()
        self._block = np.searchsorted(starts, graph.values.alloc[order], side="right").tolist()
        self._held = every_unsaved_input(chain)

    def __len__(self) -> int:
        return len(self._order)

    def first(self, count: int) -> Selection:
        members: dict[int, set[int]] = {}
        for value, block in zip(self._order[:count], self._block[:count], strict=True):
            members.setdefault(block, set()).add(value)
        return Selection(tuple(map(frozenset, members.values())), self._held)
