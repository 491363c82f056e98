"""CUDA graphs that a script captures, and its memory pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import optimizer as optim_module

from memplan.capturing.cuda.fake_cuda import Pool, keep_graph
from memplan.capturing.operators.fake import record_launch

if TYPE_CHECKING:
    from memplan.capturing.cuda.fake_cuda import FakeCuda


class FakeGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    _api: FakeCuda

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: Pool | None = None
        self._first_op = 0
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
        self._first_op = api.state.recorder.builder.op
        api.enter_pool(self._pool)

    def _stepped(self, *_call: Any) -> None:
        self._steps += 1

    def capture_end(self) -> None:
        """The graph is there."""
        api = self._api
        keep_graph(api.state, api.state.recorder.builder.op - self._first_op)
        self._hook.remove()
        api.pools.capturing = False
        api.leave_pool()

    def replay(self) -> None:
        """Run it: nothing is allocated. Raises EnoughSeen once the capture is over."""
        state = self._api.state
        record_launch(state, "cuda.graph_replay", [], [])
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
        """Those who use it."""
        return 1

    def snapshot(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        """Not available while estimating."""
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
