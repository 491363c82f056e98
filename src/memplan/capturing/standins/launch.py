"""Launches of the script's own kernels, of Triton or of CUDA source: they write to tensors that are
passed in, and allocate nothing."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from memplan.capturing.operators.fake import record_launch
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.standins.registry import rule_for_function
from memplan.capturing.standins.rules import Call, acting, running
from memplan.capturing.state import CaptureState

_SAID = {
    "triton": "Triton kernels are not run: they allocate nothing, and what they write is not "
    "known; where one takes a workspace, say so with memplan.register_rule",
    "nvrtc": "kernels that the script compiles of CUDA source are not run: they allocate nothing, "
    "and what they write is not known",
}

_TUNED = (
    "Triton times the configurations of an autotuned kernel at its first launch beside a buffer of "
    "256 MiB (none where its results are on disk or it brings a benchmark of its own)"
)
FLUSHED_BYTES = 256 << 20


def launch(kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What `kernel[grid](*args, **kwargs)` does to memory: nothing, or what its rule says."""
    state = running()
    if state is None:
        raise RuntimeError("a Triton kernel was launched outside the capture that it was made in")
    name = getattr(kernel, "__name__", "kernel")
    rule = rule_for_function(f"{getattr(kernel, '__module__', '')}.{name}")
    if rule is not None:
        return rule(*args, **kwargs)
    leaves = (getattr(leaf, "base", leaf) for leaf in pytree.tree_leaves((args, kwargs)))
    _not_run(state, "triton", name, leaves)  # tensors, or a descriptor's base
    return None


def _not_run(state: CaptureState, language: str, name: str, given: Iterable[Any]) -> None:
    tensors = [item for item in given if isinstance(item, FakeTensor)]
    record_launch(state, f"{language}.{name}", tensors, tensors)
    state.kernels[name, language, "not run: writes to what is passed in, allocates nothing"] += 1
    state.assumptions.add("kernel", _SAID[language])


class CudaKernel:
    """A kernel that the script compiled of CUDA source, as `torch.cuda._compile_kernel` gives it:
    it has nothing but the tensors that it is given."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (1, 1, 1),
        args: Sequence[Any] | None = None,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        if (state := running()) is not None:
            with torch.cuda.stream(stream):
                _not_run(state, "nvrtc", self._name, args or ())

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """It is of the chip, not of the device's memory."""


def tune(tuner: Any, names: Sequence[str], args: Any, kwargs: Any) -> None:
    """What an autotuned kernel (its configurations, keys and cache as Triton names them) takes
    when it is launched first for values of its keys and dtypes of its arguments.

    Source: Triton 3.7, `runtime/autotuner.py`: copies of what is restored after each timing, and
    `backends/nvidia/driver.py`: a buffer with which the L2 cache is cleared.
    """
    state = running()
    if state is None or len(tuner.configs) < 2:
        return
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    values = [given[key] for key in tuner.keys if key in given]
    dtypes = [str(item.dtype) for item in given.values() if hasattr(item, "dtype")]
    key = str((values, dtypes))
    if key in tuner.timed:
        return
    tuner.timed.add(key)
    with acting(state, "triton.autotune"), torch.no_grad():
        kept = [given[name] for name in tuner.restore_value if given.get(name) is not None]
        copies = [tensor.clone() for tensor in kept]
        buffer = Call().workspace(FLUSHED_BYTES, low=0, high=FLUSHED_BYTES)
        del kept, copies, buffer
    state.assumptions.add("kernel", _TUNED)


def bench(
    fn: Callable[[], Any],
    warmup: int = 25,
    rep: int = 100,
    grad_to_none: Any = None,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> Any:
    """`triton.testing.do_bench`: two calls, the second beside its buffer; a time of 1 ms."""
    state = running()
    fn()
    for tensor in grad_to_none or ():
        tensor.grad = None
    if state is not None:
        with acting(state, "triton.do_bench"):
            buffer = Call().workspace(FLUSHED_BYTES, low=0, high=FLUSHED_BYTES)
        fn()
        del buffer
    if quantiles is not None:
        return [1.0] * len(quantiles) if len(quantiles) > 1 else 1.0
    return [1.0] if return_mode == "all" else 1.0


def record(name: str, tensors: list[torch.Tensor], written: list[torch.Tensor]) -> None:
    """A kernel that a package launches on its tensors: it allocates nothing."""
    state = running()
    if state is not None:
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        record_launch(
            state, name, fakes, [tensor for tensor in written if isinstance(tensor, FakeTensor)]
        )


def adapt_jit(patches: Patches, module: types.ModuleType) -> None:
    """Adapt an installed Triton: launches go to `launch`, whatever the grid."""

    def run(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        return None if warmup else launch(kernel.fn, args, kwargs)

    patches.set(module.JITFunction, "run", run)


def adapt_autotuner(patches: Patches, module: types.ModuleType) -> None:
    """Adapt an installed Triton: nothing is timed, the first configuration is used."""

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(kernel, "configs", None):
            kernel.best_config = kernel.configs[0]
            if not hasattr(kernel, "timed"):
                kernel.timed = set()
            given = {name: item for name, item in kwargs.items() if name != "grid"}
            tune(kernel, kernel.arg_names, args, given)
        return kernel.fn.run(*args, **kwargs)

    patches.set(module.Autotuner, "run", run)
    patches.set(module.Heuristics, "run", run)


def adapt_testing(patches: Patches, module: types.ModuleType) -> None:
    """Adapt an installed Triton: there is nothing to time."""
    for name in ("do_bench", "do_bench_cudagraph"):
        if hasattr(module, name):
            patches.set(module, name, bench)


def adapt_driver(patches: Patches, module: types.ModuleType) -> None:
    """Adapt an installed Triton: its driver answers as the chosen card would."""
    if hasattr(module, "driver"):
        patches.set(module.driver, "_active", Driver())


class Driver:
    """What host code asks of Triton's driver."""

    def __init__(self) -> None:
        self.utils = self

    def get_device_properties(self, _device: int = 0) -> dict[str, int]:
        """The card's properties under Triton's names."""
        known = torch.cuda.get_device_properties(0)
        return {
            "max_shared_mem": getattr(known, "shared_memory_per_block_optin", 101_376),
            "max_num_regs": 65_536,
            "multiprocessor_count": known.multi_processor_count,
            "warpSize": 32,
        }

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_target(self) -> Any:
        """Backend and architecture of the card."""
        major, minor = torch.cuda.get_device_capability()
        return types.SimpleNamespace(backend="cuda", arch=10 * major + minor, warp_size=32)
