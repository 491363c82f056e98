"""The `Trace`: everything a training job asked of a device's memory, in columns.

The unit is the *storage generation*: a number that is never used twice. Resizing a storage ends one
generation and begins the next. Time is one integer, the index of an event: the order in which the
allocator sees requests. Lifetimes are half-open on that index, `[alloc, free)`.

Strings (op names, module paths, source lines) are interned: columns hold indices into
`Trace.strings`, and index 0 is always the empty string. All sizes are bytes as requested, before
an allocator rounds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from memplan.types.batches import Batches
from memplan.types.engines import Engine, Stage
from memplan.types.notebook import InNotebooks
from memplan.types.plan import CompiledRegion
from memplan.types.step_time import InputTime

I64: TypeAlias = npt.NDArray[np.int64]
I32: TypeAlias = npt.NDArray[np.int32]
I16: TypeAlias = npt.NDArray[np.int16]
U8: TypeAlias = npt.NDArray[np.uint8]


PRIVATE_POOLS = 1 << 16
"""Streams from this number on are private pools (of CUDA graphs, of `torch.cuda.MemPool`): their
cached memory is kept when caches are emptied. `torch.cuda.Stream` hands out smaller numbers."""
OUTSIDE = 1 << 20
"""Streams from this number on are memory of the card that PyTorch's allocator has no part in: a
pool of somebody's own, or another process. Each request takes whole pages of 2 MiB from the card
and gives them back when it ends; nothing cached makes room for it."""


class EventKind(IntEnum):
    """What the allocator sees. The comment says what `aux` holds."""

    ALLOC = 0
    """A storage generation begins. aux: its address, or -1 when unknown."""
    FREE = 1
    """The host lets go. The memory may be reused at once, unless another stream recorded it or
    a FREE_COMPLETED follows. aux: address or -1."""
    FREE_COMPLETED = 2
    """Observed only (imported logs): from here on the memory may be reused. aux: address or -1."""
    RECORD_STREAM = 3
    """`stream` uses the storage: after FREE it may be reused once that stream has passed."""
    EVENT_RECORD = 4
    """`stream` records a CUDA event. aux: the event's number."""
    EVENT_WAIT = 5
    """`stream` waits for a CUDA event. aux: the event's number."""
    SYNCHRONIZE = 6
    """The host waits for `stream`, or for the whole device when stream is -1."""
    EMPTY_CACHE = 7
    """`torch.cuda.empty_cache()`."""
    SEGMENT_ALLOC = 8
    """Observed only: the allocator asked the device for `bytes`. aux: address."""
    SEGMENT_FREE = 9
    """Observed only: the allocator gave `bytes` back to the device. aux: address."""
    SEGMENT_MAP = 10
    """Observed only: pages of an expandable segment were mapped. aux: address."""
    SEGMENT_UNMAP = 11
    """Observed only: pages of an expandable segment were unmapped. aux: address."""
    RESET_PEAK = 12
    """`torch.cuda.reset_peak_memory_stats()`; the simulator keeps the whole run's peak anyway."""
    OUT_OF_MEMORY = 13
    """Observed only: a request of `bytes` failed."""
    MARK = 14
    """Observed only: a moment that a log marks, such as a snapshot; memory does not change."""


class Phase(IntEnum):
    """What the job was doing."""

    SETUP = 0
    """Before the first forward: building the model, moving it, making the optimizer."""
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    EVALUATION = 4
    """A forward outside autograd (`no_grad`, `inference_mode`)."""
    OTHER = 5


class Provenance(IntEnum):
    """How an event is known; the width of an estimate's interval comes from it."""

    OBSERVED = 0
    """The framework asked for it, here, with this size."""
    RULE = 1
    """Derived by a documented rule (a workspace, a kernel's scratch)."""
    ASSUMED = 2
    """Depends on values of data that do not exist here; the assumption is in `TraceMeta`."""


PAGE_LOCKED = 2
"""A value of `HostEvents.pinned`."""


class HostEventKind(IntEnum):
    """What happens to the memory of the job's process in the host's RAM."""

    ALLOC = 0
    """A host storage begins that has no data here."""
    FREE = 1
    """It ends."""
    RESIDENT = 2
    """`bytes`: how much more of the capturing process was resident than when the job began, without
    what the capture itself keeps. This is the job's real data, modules and libraries."""
    WORKERS = 3
    """`bytes`: memory that the job's worker processes share with nobody, summed."""


class Role(IntEnum):
    """What a storage is for."""

    UNKNOWN = 0
    """Left to be derived from its lifetime: an activation or a temporary."""
    PARAMETER = 1
    """Parameters and buffers of modules."""
    GRADIENT = 2
    OPTIMIZER_STATE = 3
    ACTIVATION = 4
    TEMPORARY = 5
    INPUT = 6
    WORKSPACE = 7
    COMMUNICATION = 8
    GATHERED_PARAMETER = 9
    """Whole parameters that FSDP gathers from the ranks' shards, for as long as a layer runs."""
    ENGINE = 10
    """What an inference engine on the card holds: weights, KV cache, CUDA graphs."""


class Assumption(msgspec.Struct, frozen=True):
    """Something about the job that was not known and had to be decided."""

    kind: str
    """Short key, such as `routing`, `branch`, `loop`, `value`, `steady-step`."""
    text: str
    """One sentence for a person."""
    op: str = ""
    source: str = ""
    count: int = 1


class KernelChoice(msgspec.Struct, frozen=True):
    """A kernel that the real device would choose, and why."""

    op: str
    kernel: str
    reason: str
    count: int = 1


class Communicator(msgspec.Struct, frozen=True):
    """A communicator of NCCL: it takes memory of its own, outside PyTorch's allocator."""

    ranks: int
    local_ranks: int
    """Number of its ranks in the captured rank's node, with that rank."""
    nodes: int
    name: str = ""
    """What the script or library calls the group."""
    eager: bool = False
    """Whether it was created with its group, and not at the first collective."""
    collectives: list[str] = []
    """Kinds used, in the order of their first use: `all_gather`, `reduce_scatter`, `send`, …"""
    peers: int = 0
    """Ranks that were sent to or received from, one by one or in a batch."""
    settings: dict[str, str] = {}
    """`NCCL_…` variables in force that say how much memory it takes."""


class Block(msgspec.Struct, frozen=True):
    """Part of a segment that existed before the first event; `[address, address + bytes)`."""

    address: int
    bytes: int
    requested_bytes: int
    storage: int
    """The storage generation that lives in it; -1 when free, -2 when something lives in it that no
    event names."""


class Segment(msgspec.Struct, frozen=True):
    """Memory that the process held before the first event."""

    address: int
    bytes: int
    stream: int
    device: int
    blocks: list[Block]
    expandable: bool = False


class HostCapture(msgspec.Struct, frozen=True):
    """What is known of the captured process in the host's RAM beside the events."""

    growth_peak_bytes: int = 0
    """Resident memory at its peak, less what it was when the job began; 0 where the peak was
    earlier or is not known."""
    local_processes: int = 1
    """Processes of the job that share the host."""


class TraceMeta(msgspec.Struct, kw_only=True):
    """The origin of a trace."""

    schema_version: int = 6
    memplan_version: str = ""
    torch_version: str = ""
    origin: str = "capture"
    """`capture`, `snapshot` or `csv`."""
    method: str = "fake-cuda"
    """`fake-cuda`, `fake-cpu` (the wider fallback) or `observed`."""
    gpu: str = ""
    """Name of the device profile that the script saw; empty when unknown."""
    command: list[str] = []
    alloc_conf: str = ""
    """Allocator settings in force, in the syntax of `PYTORCH_ALLOC_CONF`."""
    optimizer_steps: int = 0
    stop_reason: str = ""
    steady_steps: list[int] = []
    """First and one past the last of the steps that the rest of the job is taken to repeat; empty
    where none are known, or the job ended by itself."""
    batches: list[Batches] = []
    """For each data loader that was read ahead and whose batches differ, in the job's order."""
    inputs: list[InputTime] = []
    """The time of each data loader that fed the steady steps."""
    batches_per_step: float | None = None
    """Batches that a steady step trained on: from data loaders, or copied from the host before a
    backward pass; None where none were seen."""
    samples_per_step: float | None = None
    """Samples of the batches that data loaders gave; None without loaders, where a dataset makes
    whole batches, or where it is not clear for which step they were."""
    capture_peak_bytes: int = 0
    """Resident memory of the capturing process and its children, not of the real job."""
    host: HostCapture | None = None
    """None where the host's memory was not followed."""
    assumptions: list[Assumption] = []
    kernels: list[KernelChoice] = []
    communicators: list[Communicator] = []
    card_processes: int = 1
    """Processes of the job that have their memory on the card numbered 0, this one included."""
    initial_segments: list[Segment] = []
    stages: list[Stage] = []
    """Stages in the order of their ends. Where two overlap, the one that begins later counts."""
    engines: list[Engine] = []
    regions: list[CompiledRegion] = []
    """What the plan in effect recomputed in each compiled graph."""
    clip_value: float = 0.0
    """What the job clipped gradients to that were updated in the backward pass; 0: nothing."""
    unmet: dict[str, str] = {}
    """For each part of that plan that could not be followed, the first of `notes` about it."""
    notes: list[str] = []


@dataclass(frozen=True)
class Events:
    """One row an event, in the order the allocator sees them."""

    kind: U8
    storage: I64
    """Storage generation; -1 where none is meant."""
    bytes: I64
    bytes_low: I64
    """Equal to `bytes` unless the provenance is RULE or ASSUMED."""
    bytes_high: I64
    stream: I32
    """Stream number; 0 is the default stream."""
    device: I16
    op: I64
    """Row of `Ops` that caused it; -1 for none."""
    module: I32
    phase: U8
    step: I32
    """Optimizer steps completed before this event."""
    source: I32
    provenance: U8
    aux: I64

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True)
class Ops:
    """One row an operator, in program order. `reads` and `writes` are CSR: row i owns
    `reads[reads_start[i]:reads_start[i + 1]]`."""

    name: I32
    event: I64
    """Index of the first event at or after the op's start."""
    module: I32
    phase: U8
    step: I32
    source: I32
    stream: I32
    call: I32
    """Number of the call of a root module (one that no other module called) that the op belongs
    to, counted over the run from 0; -1 outside such calls. In the backward pass -2 for what runs
    with gradients, such as the forward of a checkpointed block that runs again, and else -1. In
    call N, inside the forward of an `autograd.Function`, which runs without gradients: -3 - N."""
    flops: I64
    """Floating-point operations as `torch.utils.flop_counter` counts them for the op's shapes;
    0 for ops that it has no formula for."""
    moved_bytes: I64
    """Bytes of the tensors read and written, as viewed; 0 for views, -1 when unknown."""
    operands: I32
    """The arguments as text, from which the time of the kernel is computed: see `describe` in
    `memplan.capturing.recording.work`. Empty for views and where they were not noted."""
    reads_start: I64
    reads: I64
    """Storage generations read."""
    writes_start: I64
    writes: I64
    """Storage generations written, new ones and mutated ones alike; none for views."""

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True)
class Storages:
    """One row a storage generation; row number = generation number."""

    role: U8
    name: I32
    """Parameter or buffer name where there is one."""
    dtype: I32
    shape: I32
    """Shape of the tensor it was made for, as text: `8x1024x768`."""

    def __len__(self) -> int:
        return len(self.role)


@dataclass(frozen=True)
class HostEvents:
    """One row an event in the host's RAM, in order; a clock of its own."""

    kind: U8
    storage: I64
    """Number of the host storage (not a row of `Storages`); -1 where none is meant."""
    bytes: I64
    pinned: U8
    """1 for page-locked memory of PyTorch's host allocator, which rounds it up and keeps it;
    PAGE_LOCKED for memory that is page-locked as it is."""
    role: U8
    event: I64
    """Index of the first device event at or after it."""
    phase: U8
    step: I32
    source: I32

    def __len__(self) -> int:
        return len(self.kind)


def no_host_events() -> HostEvents:
    """The table of a trace that did not follow the host."""
    return HostEvents(**{name: np.zeros(0, dtype) for name, dtype in columns_of(HostEvents)})


_NUMPY_TYPES = {"U8": "<u1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


def columns_of(table: type[Any]) -> list[tuple[str, str]]:
    """The names and NumPy types of the columns of `Events` and similar tables."""
    return [(field.name, _NUMPY_TYPES[str(field.type)]) for field in fields(table)]


@dataclass(frozen=True)
class Trace(InNotebooks):
    """A captured or imported job. Immutable; every later stage is a function of it."""

    meta: TraceMeta
    strings: list[str]
    events: Events
    ops: Ops
    storages: Storages
    host: HostEvents = field(default_factory=no_host_events)
    _cache: dict[str, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.events)

    def event(self, index: int) -> EventView:
        """A row as an object. Raises IndexError outside `[0, len(self))`."""
        if not 0 <= index < len(self):
            raise IndexError(f"event {index} of a trace of {len(self)}")
        return self._view(index)

    def __iter__(self) -> Iterator[EventView]:
        return map(self._view, range(len(self)))

    def _view(self, index: int) -> EventView:
        events, strings = self.events, self.strings
        op = int(events.op[index])
        return EventView(
            index=index,
            kind=EventKind(int(events.kind[index])),
            storage=int(events.storage[index]),
            bytes=int(events.bytes[index]),
            stream=int(events.stream[index]),
            device=int(events.device[index]),
            op=strings[int(self.ops.name[op])] if op >= 0 else "",
            module=strings[int(events.module[index])],
            source=strings[int(events.source[index])],
            phase=Phase(int(events.phase[index])),
            step=int(events.step[index]),
            provenance=Provenance(int(events.provenance[index])),
        )


@dataclass(frozen=True, slots=True)
class EventView:
    """One event of a trace."""

    index: int
    kind: EventKind
    storage: int
    bytes: int
    stream: int
    device: int
    op: str
    """Name of the operator, or the empty string."""
    module: str
    source: str
    phase: Phase
    step: int
    provenance: Provenance
