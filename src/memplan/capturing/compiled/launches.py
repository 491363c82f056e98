"""What the code of a compiled graph calls: kernels that compute nothing, buffers that are fake."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.operators.fake import record_launch
from memplan.capturing.recording.context import generated_origin
from memplan.capturing.state import CaptureState

_PARAMETERS = re.compile(r"^def \w+\((.*?)\):", re.MULTILINE | re.DOTALL)
_MUTATED = re.compile(r"'mutated_arg_names': \[([^\]]*)\]")
_WRITTEN = ("out_ptr", "in_out_ptr", "ws_ptr")


class Kernel:
    """A generated kernel: each launch is one operator of the trace."""

    def __init__(self, state: CaptureState, name: str, source: str) -> None:
        """`source` is the kernel as Inductor wrote it; what it writes is told by its parameters."""
        self._state = state
        self.name = f"inductor.{name}"
        self._written = _written(source)

    def run(self, *args: Any, **_kwargs: Any) -> None:
        """Launch it. Raises EnoughSeen once the capture is over."""
        tensors = [(i, item) for i, item in enumerate(args) if isinstance(item, FakeTensor)]
        written = [tensor for i, tensor in tensors if i in self._written]
        record_launch(self._state, self.name, [tensor for _, tensor in tensors], written)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.run(*args, **kwargs)


def _written(source: str) -> frozenset[int]:
    """Positions of the parameters that a kernel writes; all where that cannot be read."""
    found = _PARAMETERS.search(source)
    if found is None:
        return frozenset(range(64))
    names = [part.split(":")[0].strip() for part in found.group(1).split(",")]
    mutated = _MUTATED.search(source)
    extra = set(re.findall(r"'(\w+)'", mutated.group(1))) if mutated else set()
    return frozenset(
        i for i, name in enumerate(names) if name.startswith(_WRITTEN) or name in extra
    )


def kernel_makers(state: CaptureState) -> dict[str, Callable[..., Any]]:
    """What stands in for the methods of `AsyncCompile`, by name."""

    def generated(_self: Any, name: str, source: str, *_args: Any, **_kwargs: Any) -> Kernel:
        return Kernel(state, name, source)

    def one_of(_self: Any, _name: str, kernels: list[Kernel], *_args: Any, **_kwargs: Any) -> Any:
        return kernels[0]

    def on_host(_self: Any, *args: Any, **_kwargs: Any) -> Kernel:
        source = next((item for item in reversed(args) if isinstance(item, str)), "")
        found = re.search(r"\b(cpp_fused\w*|kernel)\(", source)
        return Kernel(state, found.group(1) if found else "cpp", "")

    return {
        "triton": generated,
        "multi_kernel": one_of,
        "cpp": on_host,
        "cpp_pybinding": on_host,
    }


def primitives(state: CaptureState) -> dict[str, Any]:
    """What stands in for the C++ functions that a compiled graph's code calls, by name."""

    def empty_on(device: str) -> Callable[..., torch.Tensor]:
        def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            frame = sys._getframe(1)
            origin = generated_origin(frame)
            before = state.acting, state.acting_for
            if origin is not None:
                state.acting, state.acting_for = f"inductor.buffer.{origin.op}", frame
            try:
                return torch.empty_strided(size, stride, dtype=dtype, device=device)
            finally:
                state.acting, state.acting_for = before

        return empty_strided

    def empty_on_host(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        # Fake, as all that the graph computes.
        with state.fake_mode:
            made = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        if state.device_type == "cpu":
            state.record(made)  # type: ignore[arg-type]
        return made

    def reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    return {
        "empty_strided_cuda": empty_on("cuda"),
        "empty_strided_cpu": empty_on_host,
        "empty_strided_cpu_pinned": empty_on_host,
        "reinterpret_tensor": reinterpret,
        "assert_size_stride": nothing,
        "assert_alignment": nothing,
        "get_raw_stream": lambda _index: 0,
    }
