"""CUDA graphs that a script captures, and its memory pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import optimizer as optim_module

from memplan.capturing.cuda.fake_cuda import FakeCuda, Pool, keep_graph
from memplan.capturing.operators.fake import record_launch
from memplan.types.op_names import GRAPH_REPLAY


class FakeGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    _api: FakeCuda

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: Pool | None = None
        self._ops = range(0)
        self._steps = 0
        self._hook: Any = None

    def capture_begin(self, pool: Pool | None = None, *_state: Any, **_options: Any) -> None:
        """Operators from here on are the graph's. Raises RuntimeError inside another capture."""
        api = self._api
        if api.pools.capturing:
            raise RuntimeError("a CUDA graph is captured inside the capture of another")
        self._pool = pool or api.pools.handle()
        api.pools.capturing = True
        self._hook = optim_module.register_optimizer_step_post_hook(self._stepped)
        self._ops = range(api.state.recorder.builder.op + 1, 0)
        api.enter_pool(self._pool)

    def _stepped(self, *_call: Any) -> None:
        self._steps += 1

    def capture_end(self) -> None:
        api = self._api
        self._ops = range(self._ops.start, api.state.recorder.builder.op + 1)
        keep_graph(api.state, len(self._ops))
        self._hook.remove()
        api.pools.capturing = False
        api.leave_pool()

    def replay(self) -> None:
        """Run it: nothing is allocated. Raises EnoughSeen once the capture is over."""
        state = self._api.state
        record_launch(state, GRAPH_REPLAY, [], [])
        captured = f"{self._ops.start}:{self._ops.stop}"
        state.recorder.builder.op_work(flops=0, moved_bytes=0, operands=captured)
        if self._steps:
            self._api.replayed_step()

    def pool(self) -> Pool | None:
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
        return 1

    def snapshot(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        """Empty: there is no snapshot of a pool while estimating."""
        return []


def use_mem_pool(api: FakeCuda) -> Callable[..., Any]:
    """`torch.cuda.use_mem_pool`."""

    @contextmanager
    def use(pool: FakeMemPool, device: Any = None) -> Iterator[None]:
        api.enter_pool(pool.id)
        try:
            yield
        finally:
            api.leave_pool()

    return use
