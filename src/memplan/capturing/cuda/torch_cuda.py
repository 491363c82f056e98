"""`torch.cuda` as it would answer on the chosen device, for the length of a capture.

Only Python is patched here; the C++ side is `device`. What a script can ask is answered from the
device profile and from what has been recorded so far; what it can tell (streams, events,
synchronisation, `empty_cache`) is recorded.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from memplan.capturing.cuda import generators, tensor_types
from memplan.capturing.cuda.fake_cuda import FakeCuda, FakeStream
from memplan.capturing.cuda.graphs import FakeGraph, FakeMemPool, use_mem_pool
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.state import CaptureState
from memplan.types.device import DeviceProfile
from memplan.types.trace import EventKind

CUDA_VERSION = "13.0"
_CUDNN_VERSION = 91200
_NCCL_VERSION = (2, 28, 9)
_DTYPES = frozenset(item for item in vars(torch).values() if isinstance(item, torch.dtype))


def install(
    patches: Patches,
    state: CaptureState,
    profile: DeviceProfile,
    devices: int = 1,
    *,
    alone: bool = False,
) -> FakeCuda:
    """Patch `torch.cuda` and its neighbours until `patches.undo()`. The process sees `devices`
    GPUs. `alone`: nobody said how many the job has."""
    api = FakeCuda(state, profile, devices, alone=alone)
    cuda = torch.cuda
    for name, answer in _answers(api).items():
        patches.set(cuda, name, answer, new=True)  # some are of a build for CUDA, or of a release
        for part in (cuda.memory, cuda.random, cuda.graphs, cuda.profiler):
            if name in vars(part):
                patches.set(part, name, answer)
    patches.set(cuda.graphs.graph, "default_capture_stream", None)
    if not hasattr(torch._C, "_host_emptyCache"):
        patches.set(torch._C, "_host_emptyCache", lambda: None, new=True)
    _install_neighbours(patches, api)
    return api


def _install_neighbours(patches: Patches, api: FakeCuda) -> None:
    """Versions, backends, accelerator, generators and tensor methods that speak of the device."""
    patches.set(torch.version, "cuda", CUDA_VERSION)
    patches.set(torch.backends.cuda, "is_built", lambda: True)
    patches.set(torch.backends.cudnn, "is_available", lambda: True)
    patches.set(torch.backends.cudnn, "is_acceptable", lambda _tensor: True)
    patches.set(torch.backends.cudnn, "version", lambda: _CUDNN_VERSION)
    # Asked by scripts of one process too; torch.distributed's own modules keep what is true.
    patches.set(torch.distributed, "is_nccl_available", lambda: True)
    patches.set(torch.cuda.nccl, "version", lambda: _NCCL_VERSION)
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        patches.set(torch.cuda.nvtx, name, lambda *_args, **_kwargs: 0)
    accelerator = torch.accelerator
    for name, answer in {
        "is_available": lambda: True,
        "device_count": torch.cuda.device_count,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: api.index,
        "current_device_idx": lambda: api.index,
        "set_device_index": torch.cuda.set_device,
        "set_device_idx": torch.cuda.set_device,
        "device_index": torch.cuda.device,
        "current_stream": torch.cuda.current_stream,
        "set_stream": api.switch,
        "synchronize": torch.cuda.synchronize,
        "empty_cache": torch.cuda.empty_cache,
        "empty_host_cache": lambda: None,
        "get_device_capability": lambda device=None: {"supported_dtypes": set(_DTYPES)},
        "get_memory_info": torch.cuda.mem_get_info,
        "reset_accumulated_memory_stats": torch.cuda.reset_accumulated_memory_stats,
        "memory_stats": api.memory_stats,
        "memory_allocated": torch.cuda.memory_allocated,
        "max_memory_allocated": torch.cuda.max_memory_allocated,
        "memory_reserved": torch.cuda.memory_reserved,
        "max_memory_reserved": torch.cuda.max_memory_reserved,
        "reset_peak_memory_stats": torch.cuda.reset_peak_memory_stats,
    }.items():
        for part in (accelerator, getattr(accelerator, "memory", None)):
            if part is not None and name in vars(part):
                patches.set(part, name, answer)
    generators.install(patches, api)
    tensor_types.install(patches)

    def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
        number = api.state.number_of(tensor)
        if number >= 0:
            api.state.recorder.mark(
                EventKind.RECORD_STREAM, stream=stream.stream_id, storage=number
            )

    def scatter(
        tensor: torch.Tensor, _devices: Any, _sizes: Any, _dim: int, streams: Any
    ) -> tuple[torch.Tensor, ...]:
        """`DataParallel` on the one device there is."""
        with api.stream_context(streams[0] if streams else None):
            return (tensor.to("cuda", non_blocking=True),)

    def gather(tensors: Any, _dim: int, device: int) -> torch.Tensor:
        """The gradient of what was scattered: a copy (`torch/csrc/cuda/comm.cpp`)."""
        copied: torch.Tensor = tensors[0].cpu() if device < 0 else tensors[0].clone()
        return copied

    _install_profilers(patches)
    patches.set(torch.Tensor, "record_stream", record_stream)
    patches.set(torch, "Stream", api.Stream)
    patches.set(torch, "Event", api.Event)
    patches.set(torch._C, "_scatter", scatter, new=True)  # of a build for CUDA
    patches.set(torch._C, "_gather", gather, new=True)


def _install_profilers(patches: Patches) -> None:
    """Profilers of the script see the host alone: of the device each operator would fail to record
    an event. Nor do they keep stacks, most of which are of the capture."""
    profiler = torch.autograd.profiler
    start = profiler.profile.__init__

    def start_on_host(profile: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_cuda") or kwargs.get("use_device") == "cuda":
            kwargs |= {"use_cuda": False, "use_device": None, "use_cpu": True}
        start(profile, *args, **kwargs | {"with_stack": False})

    patches.set(profiler.profile, "__init__", start_on_host)
    patches.set(profiler.emit_nvtx, "__enter__", lambda emitting: emitting)
    patches.set(profiler.emit_nvtx, "__exit__", lambda _emitting, exc_type, exc_val, exc_tb: None)


def _answers(api: FakeCuda) -> dict[str, Any]:
    """Attributes of `torch.cuda` and what stands in their place."""
    return {
        **_device(api),
        **_streams(api),
        **_memory(api),
        **_graphs(api),
    }


class DeviceContext:
    """Stands in for the context managers `torch.cuda.device` and `device_of`."""

    _api: FakeCuda

    def __init__(self, device: Any = None) -> None:
        self.idx = self._api.index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = self._api.set_device(self.idx)

    def __exit__(self, *_exc: object) -> None:
        self._api.set_device(self.prev_idx)


def _constant(value: Any) -> Any:
    return lambda *_args, **_kwargs: value


def _device(api: FakeCuda) -> dict[str, Any]:
    profile = api.profile

    def device_count() -> int:
        api.state.devices_counted(sys._getframe(1))
        return api.devices

    def get_name(*_args: Any, **_kwargs: Any) -> str:
        return profile.device_name

    context = type("device", (DeviceContext,), {"_api": api, "__module__": "torch.cuda"})

    def device_of(obj: Any) -> Any:
        return context(obj)

    def device_guard(index: int) -> Any:
        return context(index)

    return {
        "is_available": _constant(True),
        "is_initialized": api.initialized,
        "init": _constant(None),
        "_lazy_init": _constant(None),
        "_lazy_call": lambda callable, **_kwargs: callable(),
        "_is_compiled": _constant(True),
        "device_count": device_count,
        "_device_count_nvml": lambda: api.devices,
        "current_device": lambda: api.index,
        "set_device": api.choose_device,
        "_exchange_device": api.set_device,
        "_maybe_exchange_device": api.set_device,
        "device": context,
        "device_of": device_of,
        "_DeviceGuard": device_guard,
        "get_device_name": get_name,
        "get_device_capability": _constant(profile.capability),
        "get_device_properties": api.properties,
        "get_arch_list": _constant(["sm_{}{}".format(*profile.capability)]),
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or profile.capability[0] >= 8
        ),
        "is_tf32_supported": _constant(profile.capability[0] >= 8),
        "can_device_access_peer": _constant(False),
        "utilization": _constant(0),
        "temperature": _constant(40),
        "power_draw": _constant(100_000),
        "clock_rate": _constant(1500),
        "memory_usage": _constant(0),
        "_sleep": _constant(None),
        "is_current_stream_capturing": lambda: api.pools.capturing,
        "check_error": _constant(None),
        "cudart": _constant(_runtime(api)),
        "current_blas_handle": _constant(1),
        "current_solver_handle": _constant(1),
        "get_sync_debug_mode": _constant(0),
        "set_sync_debug_mode": _constant(None),
    }


def _runtime(api: FakeCuda) -> Any:
    """What `torch.cuda.cudart()` gives: each call succeeds."""
    calls = ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister")
    return types.SimpleNamespace(
        **dict.fromkeys(calls, _constant(0)),
        cudaMemGetInfo=api.mem_get_info,
        cudaError=types.SimpleNamespace(success=0),
    )


def _streams(api: FakeCuda) -> dict[str, Any]:
    def current_stream(device: Any = None) -> Any:
        return api.current

    def default_stream(device: Any = None) -> Any:
        return api.default

    def synchronize(device: Any = None) -> None:
        api.mark(EventKind.SYNCHRONIZE, stream=-1)

    return {
        "Stream": api.Stream,
        "ExternalStream": api.ExternalStream,
        "get_stream_from_external": lambda data_ptr, device=None: api.ExternalStream(
            data_ptr, device
        ),
        "Event": api.Event,
        "stream": api.stream_context,
        "StreamContext": api.stream_context,
        "set_stream": api.switch,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "synchronize": synchronize,
    }


def _memory(api: FakeCuda) -> dict[str, Any]:
    recorder = api.state.recorder

    def stat(name: str) -> Any:
        return lambda *_args, **_kwargs: api.memory_stats()[name]

    def reset_peak(*_args: Any, **_kwargs: Any) -> None:
        recorder.flush()
        recorder.peak_live_bytes = recorder.live_bytes
        recorder.peak_cached_bytes = recorder.cached_bytes
        api.mark(EventKind.RESET_PEAK)

    def empty_cache() -> None:
        recorder.flush()
        recorder.cached_bytes = recorder.live_bytes
        api.mark(EventKind.EMPTY_CACHE)

    return {
        "empty_cache": empty_cache,
        "_set_allocator_settings": api.set_alloc_conf,
        "ipc_collect": _constant(None),
        "mem_get_info": api.mem_get_info,
        "memory_stats": api.memory_stats,
        "memory_allocated": stat("allocated_bytes.all.current"),
        "max_memory_allocated": stat("allocated_bytes.all.peak"),
        "memory_reserved": stat("reserved_bytes.all.current"),
        "max_memory_reserved": stat("reserved_bytes.all.peak"),
        "memory_cached": stat("reserved_bytes.all.current"),
        "max_memory_cached": stat("reserved_bytes.all.peak"),
        "memory_stats_as_nested_dict": api.memory_stats_as_nested_dict,
        "_record_memory_history": _constant(None),
        "_snapshot": _constant({"segments": [], "device_traces": [[]]}),
        "_dump_snapshot": _constant(None),
        "memory_summary": _constant("memory summaries are not available while estimating"),
        "memory_snapshot": _constant([]),
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
        "reset_max_memory_cached": reset_peak,
        "reset_accumulated_memory_stats": _constant(None),
        "reset_accumulated_host_memory_stats": _constant(None),
        "reset_peak_host_memory_stats": _constant(None),
        "device_memory_used": lambda device=None: (
            api.profile.total_memory_bytes - api.mem_get_info()[0]
        ),
        "set_per_process_memory_fraction": api.set_memory_fraction,
        "get_per_process_memory_fraction": lambda *_args, **_kwargs: api.memory_fraction,
        "get_allocator_backend": _constant("native"),
    }


def _graphs(api: FakeCuda) -> dict[str, Any]:
    """`torch.cuda.graph` and `make_graphed_callables` are PyTorch's own, above these."""
    made = {"_api": api, "__module__": "torch.cuda"}
    return {
        "CUDAGraph": type("CUDAGraph", (FakeGraph,), made),
        "graph_pool_handle": api.pools.handle,
        "MemPool": type("MemPool", (FakeMemPool,), made),
        "use_mem_pool": use_mem_pool(api),
    }
