"""Private pools of PyTorch's allocator: of CUDA graphs that a script captures, and `MemPool`.

What is allocated while a graph is captured comes from the graph's pool. Blocks that are freed there
are used again in the pool alone, and its segments are never given back while a graph of it lives
(`c10/cuda/CUDACachingAllocator.cpp`, `PrivatePool`). A replay asks for nothing. In the trace a
pool's part of a stream is a stream of its own, from `PRIVATE_POOLS` on. That a pool's segments
become free once its last graph is gone is not followed: they are kept, and counted.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from memplan.types.trace import PRIVATE_POOLS

if TYPE_CHECKING:
    from memplan.capturing.state import CaptureState

COMPILED_GRAPHS = PRIVATE_POOLS
"""The one pool that all graphs of compiled code share."""
_NODE_BYTES = (0, 16 << 10, 64 << 10)
"""Low, expected and high bytes of the device for one kernel of an instantiated graph: the driver
does not say, and it has not been measured here, hence the wide bounds."""
Pool = tuple[int, int]


def keep_graph(state: CaptureState, nodes: int) -> None:
    """What an instantiated graph of so many kernels takes, for good."""
    recorder = state.recorder
    recorder.builder.begin_op("cuda.graph_instantiate", stream=recorder.stream)
    low, expected, high = (nodes * size for size in _NODE_BYTES)
    if expected:
        recorder.scratch(low, expected, high, 0, name="CUDA graph")


class PrivatePools:
    """Where requests go while a pool is in force."""

    def __init__(self) -> None:
        self.in_force: list[Pool] = []
        """The innermost last."""
        self.capturing = False
        self._handles = itertools.count(1)
        self._numbers: dict[tuple[Pool, int], int] = {}

    def handle(self) -> Pool:
        """Of a new pool: `torch.cuda.graph_pool_handle`."""
        return (0, next(self._handles))

    def stream(self, stream: int) -> int:
        """The trace's number of a stream's memory."""
        if not self.in_force:
            return stream
        # The first number is that of compiled graphs.
        return self._numbers.setdefault(
            (self.in_force[-1], stream), COMPILED_GRAPHS + 1 + len(self._numbers)
        )
