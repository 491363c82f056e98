"""The device behind `torch.cuda`: its profile, streams, events and memory questions."""

from __future__ import annotations

import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memplan.capturing.cuda.device import set_current_device
from memplan.capturing.state import CaptureState
from memplan.types.device import DeviceProfile
from memplan.types.engines import GRAPH_NODE_BYTES
from memplan.types.trace import PRIVATE_POOLS, EventKind

_SEGMENT = 2 << 20
_STREAMS_IN_POOL = 32
_STREAM_PRIORITIES = 4
_STATISTICS = (
    "allocated_bytes",
    "active_bytes",
    "requested_bytes",
    "reserved_bytes",
    "inactive_split_bytes",
    "allocation",
    "active",
    "segment",
    "inactive_split",
)


class FakeStream:
    """Stands in for `torch.cuda.Stream`."""

    _api: FakeCuda
    device_type = 1

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        **_kwargs: Any,
    ) -> None:
        """`stream_id`: that of a stream there is already."""
        self.device = torch.device("cuda", self._api.index_of(device))
        self.priority = priority
        if stream_id is None:
            stream_id = self._api.new_stream_number(priority)
        self.stream_id = stream_id
        self.cuda_stream = self.native_handle = self.stream_id

    @property
    def device_index(self) -> int:
        return int(self.device.index or 0)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = self._api.Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self._api.mark(EventKind.EVENT_WAIT, stream=self.stream_id, aux=event.number)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self._api.mark(EventKind.SYNCHRONIZE, stream=self.stream_id)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return self._api.pools.capturing and self._api.current == self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self) -> FakeStream:
        self._before = self._api.current
        self._api.switch(self)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._api.switch(self._before)


class FakeExternalStream(FakeStream):
    """Stands in for `torch.cuda.ExternalStream`: a stream's address is its number here."""

    def __init__(self, stream_ptr: int, device: Any = None, **_kwargs: Any) -> None:
        super().__init__(device, stream_id=stream_ptr)


class FakeEvent:
    """Stands in for `torch.cuda.Event`."""

    _api: FakeCuda
    _numbers = itertools.count()

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.number = next(self._numbers)
        self.device = torch.device("cuda", self._api.index)
        self.cuda_event = self.number
        self.event_id = self.number

    def record(self, stream: FakeStream | None = None) -> None:
        stream = self._api.current if stream is None else stream
        self._api.mark(EventKind.EVENT_RECORD, stream=stream.stream_id, aux=self.number)

    def wait(self, stream: FakeStream | None = None) -> None:
        (self._api.current if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: FakeEvent) -> float:
        return 1.0

    def synchronize(self) -> None:
        self._api.mark(EventKind.SYNCHRONIZE, stream=-1)


class FakeCuda:
    """State behind the answers: the profile, the current stream, and the recorder."""

    def __init__(
        self, state: CaptureState, profile: DeviceProfile, devices: int, *, alone: bool = False
    ) -> None:
        self.state = state
        self.profile = profile
        self.devices = devices
        """How many the process sees; each like `profile`."""
        self.index = 0
        """The current one."""
        state.devices = devices
        state.alone = alone
        state.current_device = lambda: self.index
        set_current_device(0)
        self.chosen = False
        """Whether the script has made a device the current one, by `torch.cuda.set_device`."""
        self.touched = False
        """Whether any has been made the current one, by whatever means."""
        self.alloc_conf = ""
        """Allocator settings that the script made at run time."""
        self.memory_fraction = 1.0
        self.pools = PrivatePools()
        self.replayed_step: Callable[[], None] = lambda: None
        """Called when a CUDA graph that contains an optimizer step has run again."""
        self._streams_made: Counter[int] = Counter()
        self.Stream: Any = type("Stream", (FakeStream,), {"_api": self, "__module__": "torch.cuda"})
        self.ExternalStream: Any = type(
            "ExternalStream", (FakeExternalStream, self.Stream), {"__module__": "torch.cuda"}
        )
        self.Event: Any = type("Event", (FakeEvent,), {"_api": self, "__module__": "torch.cuda"})
        self.default = self.Stream()
        self.default.stream_id = self.default.cuda_stream = 0
        self._streams_made.clear()
        self.current: FakeStream = self.default

    def index_of(self, device: Any = None) -> int:
        """Index of a device however it is named; a tensor's own; by default the current one."""
        if isinstance(device, torch.Tensor):
            device = device.device if device.is_cuda else None
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            device = device.index
        return self.index if device is None else int(device)

    def set_device(self, device: Any) -> int:
        """Make a device the current one, and say which was. Raises RuntimeError, as CUDA does, for
        one that is not there."""
        before, index = self.index, self.index_of(device)
        if index >= self.devices:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal (device {index}, {self.devices} visible)"
            )
        if index >= 0:
            self.touched = True
            self.index = index
            set_current_device(index)
            self.default.device = torch.device("cuda", index)
        return before

    def choose_device(self, device: Any) -> None:
        """`torch.cuda.set_device`. Raises as `set_device` does."""
        self.set_device(device)
        self.chosen = True

    def initialized(self) -> bool:
        """Whether CUDA would have been started by now; `DeviceMesh` chooses a device if not."""
        return self.touched or self.state.recorder.peak_live_bytes > 0

    def new_stream_number(self, priority: int) -> int:
        """PyTorch hands out 32 streams for each of four priorities, round and round
        (`c10/cuda/CUDAStream.cpp`); 0 is the default stream."""
        pool = min(max(-priority, 0), _STREAM_PRIORITIES - 1)
        number = self._streams_made[pool] % _STREAMS_IN_POOL
        self._streams_made[pool] += 1
        return 1 + pool * _STREAMS_IN_POOL + number

    def mark(self, kind: EventKind, *, stream: int = 0, aux: int = -1) -> None:
        self.state.recorder.mark(kind, stream=stream, aux=aux)

    def switch(self, stream: FakeStream | None) -> None:
        """Make a stream the current one."""
        if stream is not None:
            self.current = stream
            self.state.recorder.stream = self.pools.stream(stream.stream_id)
            if torch._C._current_graph_task_id() == -1:
                self.state.context.outer_stream = stream.stream_id

    @contextmanager
    def stream_context(self, stream: FakeStream | None) -> Iterator[None]:
        before = self.current
        self.switch(stream)
        try:
            yield
        finally:
            self.switch(before)

    def set_alloc_conf(self, env: str) -> None:
        """`torch.cuda.memory._set_allocator_settings`: keys said before stay in force."""
        self.alloc_conf = ",".join(filter(None, (self.alloc_conf, env)))

    def set_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """`torch.cuda.set_per_process_memory_fraction`, which is an allocator setting too. Raises
        as it does."""
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        if self.index_of(device) == self.index:
            self.memory_fraction = fraction
            self.set_alloc_conf(f"per_process_memory_fraction:{fraction}")

    # Memory questions

    def reserved(self, nbytes: int) -> int:
        return min(-(-nbytes // _SEGMENT) * _SEGMENT, self.profile.total_memory_bytes)

    def memory_stats(self, *_args: Any, **_kwargs: Any) -> dict[str, int]:
        recorder = self.state.recorder
        recorder.flush()
        stats = {
            f"{name}.{pool}.{figure}": 0
            for name in _STATISTICS
            for pool in ("all", "small_pool", "large_pool")
            for figure in ("current", "peak", "allocated", "freed")
        }
        for name in ("oversize_allocations", "oversize_segments"):
            stats.update({f"{name}.{figure}": 0 for figure in ("current", "peak")})
        stats |= {"num_alloc_retries": 0, "num_ooms": 0, "num_sync_all_streams": 0}
        stats |= {"num_device_alloc": 0, "num_device_free": 0, "max_split_size": -1}
        pairs = {
            "allocated_bytes": (recorder.live_bytes, recorder.peak_live_bytes),
            "active_bytes": (recorder.live_bytes, recorder.peak_live_bytes),
            "requested_bytes": (recorder.live_bytes, recorder.peak_live_bytes),
            "reserved_bytes": (
                self.reserved(recorder.cached_bytes),
                self.reserved(recorder.peak_cached_bytes),
            ),
        }
        for name, (current, peak) in pairs.items():
            stats[f"{name}.all.current"] = current
            stats[f"{name}.all.peak"] = peak
        return stats

    def memory_stats_as_nested_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for name, value in self.memory_stats().items():
            *folders, last = name.split(".")
            place = nested
            for folder in folders:
                place = place.setdefault(folder, {})
            place[last] = value
        return nested

    def enter_pool(self, pool: tuple[int, int]) -> None:
        """What is allocated from here on belongs to a private pool."""
        self.state.recorder.flush()
        self.pools.in_force.append(pool)
        self.state.recorder.stream = self.pools.stream(self.current.stream_id)

    def leave_pool(self) -> None:
        self.state.recorder.flush()
        self.pools.in_force.pop()
        self.state.recorder.stream = self.pools.stream(self.current.stream_id)

    def mem_get_info(self, *_args: Any, **_kwargs: Any) -> tuple[int, int]:
        total = self.profile.total_memory_bytes
        self.state.recorder.flush()
        recorder = self.state.recorder
        used = self.reserved(recorder.cached_bytes) + self.profile.context_bytes
        used += recorder.outside_bytes
        return max(total - used, 0), total

    def properties(self, *_args: Any, **_kwargs: Any) -> Any:
        profile = self.profile
        major, minor = profile.capability
        return types.SimpleNamespace(
            name=profile.device_name,
            major=major,
            minor=minor,
            total_memory=profile.total_memory_bytes,
            multi_processor_count=profile.sm_count,
            clock_rate=1_500_000,
            memory_clock_rate=1_500_000,
            memory_bus_width=5120,
            is_integrated=0,
            is_multi_gpu_board=0,
            max_threads_per_block=1024,
            max_threads_per_multi_processor=2048 if (major, minor) in ((8, 0), (9, 0)) else 1536,
            warp_size=32,
            gcnArchName="",
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=profile.shared_memory_per_block_optin_bytes,
            shared_memory_per_multiprocessor=profile.shared_memory_per_block_optin_bytes + 1024,
            L2_cache_size=profile.l2_bytes,
            uuid="GPU-00000000-0000-0000-0000-000000000000",
            pci_bus_id=0,
            pci_device_id=0,
            pci_domain_id=0,
        )


COMPILED_GRAPHS = PRIVATE_POOLS
"""The one pool that all graphs of compiled code share."""
Pool = tuple[int, int]


def keep_graph(state: CaptureState, nodes: int) -> None:
    """What an instantiated graph of so many kernels takes, for good."""
    recorder = state.recorder
    recorder.builder.begin_op("cuda.graph_instantiate", stream=recorder.stream)
    low, expected, high = (nodes * size for size in GRAPH_NODE_BYTES)
    if expected:
        recorder.scratch(low, expected, high, 0, name="CUDA graph")


class PrivatePools:
    """Where requests go while a pool is in force: of CUDA graphs that a script captures, `MemPool`.

    What is allocated while a graph is captured comes from the graph's pool. Blocks that are freed
    there are used again in the pool alone, and its segments are never given back while a graph of
    it lives (`c10/cuda/CUDACachingAllocator.cpp`, `PrivatePool`). A replay asks for nothing. In the
    trace a pool's part of a stream is a stream of its own, from `PRIVATE_POOLS` on. That a pool's
    segments become free once its last graph is gone is not followed: they are kept, and counted.
    """

    def __init__(self) -> None:
        self.in_force: list[Pool] = []
        """The innermost last."""
        self.capturing = False
        self._handles = itertools.count(1)
        self._numbers: dict[tuple[Pool, int], int] = {}

    def handle(self) -> Pool:
        """The id of a new pool: `torch.cuda.graph_pool_handle`."""
        return (0, next(self._handles))

    def stream(self, stream: int) -> int:
        """The trace's number of a stream's memory."""
        if not self.in_force:
            return stream
        # The first number is that of compiled graphs.
        return self._numbers.setdefault(
            (self.in_force[-1], stream), COMPILED_GRAPHS + 1 + len(self._numbers)
        )
