"""Memory that Inductor takes while it times kernels, and what it decides by timing.

Sources: `benchmark_gpu` in `torch/_inductor/runtime/benchmarking.py` clears the L2 cache with a
buffer of its size before each round; `CachingAutotuner` (`runtime/triton_heuristics.py`) times
pointwise kernels in two configurations at their first launch; `AlgorithmSelectorCache`
(`select_algorithm.py`) times matrix products on inputs and an output of its own, with
`max_autotune`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import ir

from memplan.capturing.state import CaptureState
from memplan.types.device import DeviceProfile

_HALF = 2
_COMPUTE_BOUND = 100.0
"""Products per element moved above which tensor cores in 16 bit wait for nothing else: half the
machine balance of an A100 (312 TFLOPS, 1,555 GB/s), as `is_mm_compute_bound` in
`torch/_inductor/fx_passes/pad_mm.py` takes it. In 32 bit odd sizes cost next to nothing."""
_GENERATED = (ir.ComputedBuffer, ir.TemplateBuffer)


class Tuning:
    """The rules for one capture."""

    def __init__(self, state: CaptureState, profile: DeviceProfile) -> None:
        self._state = state
        self._l2 = profile.l2_bytes
        self.products = False
        """Whether matrix products are timed (`max_autotune`)."""

    def before_first(self, call: Callable[..., Any], lowering: Any) -> Callable[..., Any]:
        """A graph's code, that at its first run takes and returns what timing needs."""
        if self._state.device_type == "cpu":
            return call
        times_kernels = any(isinstance(buffer, _GENERATED) for buffer in lowering.buffers)
        product = max(map(_product_bytes, lowering.buffers), default=0) if self.products else 0
        nbytes = (self._l2 if times_kernels or product else 0) + product
        pending = [nbytes] if nbytes else []

        def run(arguments: Any) -> Any:
            if pending:
                self._take_and_return(pending.pop())
            return call(arguments)

        return run

    def _take_and_return(self, nbytes: int) -> None:
        """Nothing where an earlier run's results are found on disk; twice where a candidate is
        held to the result of another."""
        recorder = self._state.recorder
        recorder.builder.begin_op("inductor.autotune", stream=recorder.stream)
        low, high = 0, 2 * nbytes
        number = recorder.scratch(low, nbytes, high, 0, name="autotuning")
        recorder.release(number, low, nbytes, high, 0)

    def pads(
        self, _match: Any, left: torch.Tensor, right: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> bool:
        """Whether padding an odd matrix product pays, which Inductor finds out by timing both."""
        rows, inner, columns = (int(size) for size in (*left.shape[-2:], right.shape[-1]))
        moved = rows * inner + inner * columns + rows * columns
        intensity = rows * inner * columns / moved if moved else 0.0
        pads = left.dtype.itemsize == _HALF and intensity > _COMPUTE_BOUND
        self._state.assumptions.add(
            "compile",
            "a matrix product of odd sizes is padded where it is in 16 bit and bound by "
            "computation (a real run times both ways)",
            op=f"{rows}x{inner}x{columns}: {'padded' if pads else 'as it is'}",
        )
        return pads


def _product_bytes(buffer: Any) -> int:
    """Bytes of the operands and the result of a matrix product or convolution; 0 for others."""
    if not isinstance(buffer, ir.ExternKernelAlloc | ir.ExternKernelOut):
        return 0
    name = str(getattr(buffer, "python_kernel_name", ""))
    if not name.endswith((".mm", ".addmm", ".bmm", ".baddbmm", ".convolution")):
        return 0
    return sum(_bytes(item) for item in (buffer, *buffer.inputs))


def _bytes(node: Any) -> int:
    from torch._inductor.virtualized import V

    sizes = V.graph.sizevars.optimization_hints(node.get_size(), fallback=1)
    elements = 1
    for size in sizes:
        elements *= int(size)
    dtype: torch.dtype = node.get_dtype()
    return elements * dtype.itemsize
