"""What `torch.cuda` answers during a capture, name by name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from memplan.capture.cuda.private_pools import FakeGraph, FakeMemPool, use_mem_pool
from memplan.types.trace import EventKind

if TYPE_CHECKING:
    from memplan.capture.cuda.torch_cuda import FakeCuda


def answers(api: FakeCuda) -> dict[str, Any]:
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
        api.mode.devices_counted(sys._getframe(1))
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
        "current_blas_handle": _constant(1),
        "current_solver_handle": _constant(1),
        "get_sync_debug_mode": _constant(0),
        "set_sync_debug_mode": _constant(None),
    }


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
    recorder = api.mode.recorder

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
