"""CUDA graphs of compiled graphs (`mode="reduce-overhead"`): a pool of their own.

All graphs of a device share one private pool (`torch/_inductor/cudagraph_trees.py`): a graph's
inputs that are not at fixed addresses are copied into it, the graph runs in it once to warm up and
once to be recorded, and what the pool has reserved is never returned while the graphs live. A pool
differs from a stream's memory in nothing that matters here: blocks of one stream are not given to
another either. So a graph's allocations are recorded on a stream that nothing else uses, at every
run, replays included, which ask for nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from memplan.capture.mode import CaptureMode

POOL_STREAM = 1 << 16
"""Far from the numbers that `torch.cuda.Stream` hands out."""
_NODE_BYTES = (0, 16 << 10, 64 << 10)
"""Low, expected and high bytes of the device for one kernel of an instantiated graph: the driver
does not say, and it has not been measured here, hence the wide bounds."""


class Pool:
    """The private pool of one capture."""

    def __init__(self, mode: CaptureMode) -> None:
        self._mode = mode

    def cudagraphify(
        self, model: Callable[..., Any], static_input_idxs: Sequence[int] = (), **_kwargs: Any
    ) -> Callable[..., Any]:
        """In place of Inductor's function of that name: the graph's code, run in the pool."""
        static = frozenset(static_input_idxs)
        self._mode.assumptions.add(
            "compile",
            "CUDA graphs are recorded and replayed in a private pool, modelled as a stream's own "
            "memory; the graphs themselves take some more (docs/compile.md)",
        )
        runs = 0

        def run(new_inputs: list[Any]) -> Any:
            nonlocal runs
            runs += 1
            recorder, context = self._mode.recorder, self._mode.context
            stream_before, recorder.stream = recorder.stream, POOL_STREAM
            held_before, context.held_stream = context.held_stream, POOL_STREAM
            try:
                if runs == 1:  # the warm-up takes the inputs as they are
                    return model(new_inputs)
                inputs = [
                    self._copied(item) if i not in static else item
                    for i, item in enumerate(new_inputs)
                ]
                new_inputs.clear()
                before = recorder.builder.op
                outputs = model(inputs)
                if runs == 2:  # it has just been recorded
                    self._keep_graph(recorder.builder.op - before)
                return outputs
            finally:
                recorder.stream, context.held_stream = stream_before, held_before

        return run

    def cudagraphify_impl(
        self,
        model: Callable[..., Any],
        _inputs: Sequence[Any],
        static_input_idxs: Sequence[int],
        **_kwargs: Any,
    ) -> Callable[..., Any]:
        """The same for `backend="cudagraphs"`, which has no Inductor above it."""
        return self.cudagraphify(model, static_input_idxs)

    def _keep_graph(self, nodes: int) -> None:
        recorder = self._mode.recorder
        recorder.builder.begin_op("cuda.graph_instantiate", stream=recorder.stream)
        low, expected, high = (nodes * size for size in _NODE_BYTES)
        if expected:
            recorder.scratch(low, expected, high, 0, name="CUDA graph")

    def _copied(self, item: Any) -> Any:
        """An input at a fixed address: itself where it lives in the pool already."""
        if not isinstance(item, FakeTensor) or item.device.type != self._mode.device_type:
            return item
        found = self._mode.recorder.live.get(item.untyped_storage()._cdata)
        if found is not None and found.stream == POOL_STREAM:
            return item
        copy = torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device=item.device)
        return copy.copy_(item)
