"""Private pools of PyTorch's allocator: of CUDA graphs that a script captures, and `MemPool`.

What is allocated while a graph is captured comes from the graph's pool. Blocks that are freed there
are used again in the pool alone, and its segments are never given back while a graph of it lives
(`c10/cuda/CUDACachingAllocator.cpp`, `PrivatePool`). A replay asks for nothing. In the trace a
pool's part of a stream is a stream of its own, from `PRIVATE_POOLS` on. That a pool's segments
become free once its last graph is gone is not followed: they are kept, and counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import optimizer as optim_module

from memplan.types.trace import PRIVATE_POOLS

if TYPE_CHECKING:
    from memplan.capture.cuda.torch_cuda import FakeCuda
    from memplan.capture.mode import CaptureMode

COMPILED_GRAPHS = PRIVATE_POOLS
"""The one pool that all graphs of compiled code share."""
_NODE_BYTES = (0, 16 << 10, 64 << 10)
"""Low, expected and high bytes of the device for one kernel of an instantiated graph: the driver
does not say, and it has not been measured here, hence the wide bounds."""
_Pool = tuple[int, int]


def keep_graph(mode: CaptureMode, nodes: int) -> None:
    """What an instantiated graph of so many kernels takes, for good."""
    recorder = mode.recorder
    recorder.builder.begin_op("cuda.graph_instantiate", stream=recorder.stream)
    low, expected, high = (nodes * size for size in _NODE_BYTES)
    if expected:
        recorder.scratch(low, expected, high, 0, name="CUDA graph")


class PrivatePools:
    """Where requests go while a pool is in force."""

    def __init__(self) -> None:
        self.in_force: list[_Pool] = []
        """The innermost last."""
        self.capturing = False
        self._handles = itertools.count(1)
        self._numbers: dict[tuple[_Pool, int], int] = {}

    def handle(self) -> _Pool:
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


class FakeGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    _api: FakeCuda

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: _Pool | None = None
        self._first_op = 0
        self._steps = 0
        self._hook: Any = None

    def capture_begin(self, pool: _Pool | None = None, *_mode: Any, **_options: Any) -> None:
        """Operators from here on are the graph's. Raises RuntimeError inside another capture."""
        api = self._api
        if api.pools.capturing:
            raise RuntimeError("a CUDA graph is captured inside the capture of another")
        self._pool = pool or api.pools.handle()
        api.pools.capturing = True
        self._hook = optim_module.register_optimizer_step_post_hook(self._stepped)
        self._first_op = api.mode.recorder.builder.op
        api.enter_pool(self._pool)

    def _stepped(self, *_call: Any) -> None:
        self._steps += 1

    def capture_end(self) -> None:
        """The graph is there."""
        api = self._api
        keep_graph(api.mode, api.mode.recorder.builder.op - self._first_op)
        self._hook.remove()
        api.pools.capturing = False
        api.leave_pool()

    def replay(self) -> None:
        """Run it: nothing is allocated. Raises EnoughSeen once the capture is over."""
        mode = self._api.mode
        mode.launch("cuda.graph_replay", [], [])
        if self._steps:
            self._api.replayed_step()

    def pool(self) -> _Pool | None:
        """Handle of the pool that it was captured into."""
        return self._pool

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    reset = instantiate = enable_debug_mode = debug_dump = register_generator_state = _nothing


class FakeMemPool:
    """Stands in for `torch.cuda.MemPool`."""

    _api: FakeCuda

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.id = self._api.pools.handle()
        self.allocator = None

    def use_count(self) -> int:
        """Those who use it."""
        return 1

    def snapshot(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        """Not available while estimating."""
        return []


def use_mem_pool(api: FakeCuda) -> Callable[..., Any]:
    """`torch.cuda.use_mem_pool`."""

    @contextmanager
    def use(pool: FakeMemPool, device: Any = None) -> Iterator[None]:
        del device
        api.enter_pool(pool.id)
        try:
            yield
        finally:
            api.leave_pool()

    return use
