"""CUDA graphs of compiled graphs (`mode="reduce-overhead"`): a pool of their own.

All graphs of a device share one private pool (`torch/_inductor/cudagraph_trees.py`): a graph's
inputs that are not at fixed addresses are copied into it, the graph runs in it once to warm up and
once to be recorded, and what the pool has reserved is never returned while the graphs live
(`capturing/cuda/fake_cuda.py`). A graph's allocations are recorded in the pool at every run,
replays included, which ask for nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.cuda.fake_cuda import COMPILED_GRAPHS, keep_graph
from memplan.capturing.state import CaptureState


class Pool:
    """The private pool of one capture."""

    def __init__(self, state: CaptureState) -> None:
        self._state = state

    def cudagraphify(
        self, model: Callable[..., Any], static_input_idxs: Sequence[int] = (), **_kwargs: Any
    ) -> Callable[..., Any]:
        """Replaces Inductor's function of that name: the graph's code runs in the pool."""
        static = frozenset(static_input_idxs)
        self._state.assumptions.add(
            "compile",
            "CUDA graphs are recorded and replayed in a private pool; the graphs themselves take "
            "some more (docs/compile.md)",
        )
        runs = 0

        def run(new_inputs: list[Any]) -> Any:
            nonlocal runs
            runs += 1
            recorder, context = self._state.recorder, self._state.context
            stream_before, recorder.stream = recorder.stream, COMPILED_GRAPHS
            held_before, context.held_stream = context.held_stream, COMPILED_GRAPHS
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
                    keep_graph(self._state, recorder.builder.op - before)
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

    def _copied(self, item: Any) -> Any:
        """An input at a fixed address: itself where it lives in the pool already."""
        if not isinstance(item, FakeTensor) or item.device.type != self._state.device_type:
            return item
        found = self._state.recorder.live.get(item.untyped_storage()._cdata)
        if found is not None and found.stream == COMPILED_GRAPHS:
            return item
        copy = torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device=item.device)
        return copy.copy_(item)
