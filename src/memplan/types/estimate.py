"""The `Estimate`: the answer to "will it fit", as data. `docs/json.md` describes it for readers.

All sizes are bytes of one process on one device. Three totals nest: requested (what tensors asked
for) <= allocated (rounded to the allocator's blocks) <= reserved (segments taken from the device);
the process peak is reserved plus what PyTorch's allocator never sees (the context).
"""

from __future__ import annotations

import msgspec

from memplan.types.notebook import InNotebooks
from memplan.types.trace import Assumption, KernelChoice

SCHEMA_VERSION = 1


class GpuInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The card that the verdict is about."""

    name: str
    device_name: str
    capability: str
    total_bytes: int
    context_bytes: int
    context_low_bytes: int
    context_high_bytes: int


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """What the process peak consists of, at the peak event; the fields sum to `peak_bytes`."""

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    temporaries: int = 0
    inputs: int = 0
    workspaces: int = 0
    fragmentation: int = 0
    """Reserved but requested by nobody: rounding, unused parts of segments, cached blocks."""
    communication: int = 0
    engine: int = 0
    """Held by inference engines that share the card: weights, KV cache, CUDA graphs."""
    context: int = 0
    """Device memory of the process outside PyTorch's allocator."""
    unknown: int = 0
    """Only in recorded logs: bytes that were held before the recording began and until its end, so
    that their place is not known."""

    def items(self) -> list[tuple[str, int]]:
        """(name, bytes) in declaration order."""
        return [(name, getattr(self, name)) for name in self.__struct_fields__]

    def total(self) -> int:
        return sum(nbytes for _, nbytes in self.items())


class HostBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """What the host's RAM holds at its peak; the fields sum to `host_peak_bytes`."""

    process: int = 0
    """The interpreter, PyTorch's libraries and the host side of the CUDA context: a rule."""
    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    tensors: int = 0
    """Other tensors on the CPU that the job computes or copies there."""
    data: int = 0
    """Real memory of the script: data sets, batches, modules imported."""
    workers: int = 0
    """What worker processes hold for themselves."""
    pinned_unused: int = 0
    """Page-locked blocks beyond what their tensors asked for: rounding, and blocks kept."""


class PeakPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The position in the job at its peak. Strings are empty where unknown."""

    event: int
    """Index of the event in the trace; -1 for an empty trace."""
    op: str = ""
    module: str = ""
    phase: str = ""
    step: int = 0
    """Optimizer steps completed before: the first step is 0."""
    source: str = ""


class PhasePeak(msgspec.Struct, frozen=True, kw_only=True):
    """What one phase of the job needs."""

    phase: str
    """`setup`, `forward`, `backward`, `optimizer`, `evaluation` or `other`."""
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    """The allocator seldom gives memory back, so what earlier phases reserved counts too."""
    step: int
    """Completed optimizer steps where the most is allocated."""


class StagePeak(msgspec.Struct, frozen=True, kw_only=True):
    """What the card holds at most in one stage of a job that generates text, too."""

    stage: str
    """`engine start`, `generation`, `weight sync` or `training`."""
    peak_bytes: int
    """The peak on the card, with the context and engines."""
    high_bytes: int
    in_use_bytes: int
    """The most that tensors and engines have, with the context: the rest of the peak is kept for
    reuse, by PyTorch's allocator, from this stage or an earlier one."""
    engine_bytes: int
    """The part of the peak that engines hold."""
    step: int
    """Optimizer steps completed before."""


class EngineEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """An inference engine that shares the card with the training."""

    name: str
    """The package, `vllm`, and from a job's second engine on its number: `vllm-2`."""
    model: str
    share: float
    """The share of the card's memory that the job asks for: vLLM's `gpu_memory_utilization`."""
    weight_bytes: int
    kv_cache_bytes: int
    sleeps: bool
    """Whether its pool can be emptied while the job trains."""
    separate: bool
    """Whether it is a process of its own, with a CUDA context of its own."""
    largest_share: float | None = None
    """The largest share, in hundredths, with which the job fits at its high bound; None where none
    does, or no card is known."""
    why: str = ""
    """Why no share fits."""


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A storage alive at the peak, and who asked for it; or several that were asked for alike."""

    bytes: int
    """Bytes of one of them."""
    count: int = 1
    """Number of tensors. Where there are several, differing numbers in names are `*`."""
    shape: str
    dtype: str
    role: str
    name: str
    op: str
    module: str
    source: str


class HeldPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one place of the job holds at the peak: storages of one role that one module asked for
    on one source line. Numbers in paths of modules are `*`."""

    role: str
    module: str
    """Empty outside modules. Of parameters, gradients and their optimizer state: of the
    parameter."""
    source: str
    bytes: int
    count: int
    """Storages."""


class MemoryCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Memory over time, thinned: bucket i covers events `[events[i], events[i + 1])` (the last one
    up to the end of the trace) and holds the largest values inside it."""

    events: list[int]
    steps: list[int]
    """Optimizer steps completed before each bucket: the first step is 0."""
    allocated_bytes: list[int]
    reserved_bytes: list[int]


class RankEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """One captured rank of a job of several."""

    rank: int
    why: str
    """Why this rank was captured."""
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    reserved_peak_bytes: int
    allocated_peak_bytes: int
    fits: bool | None
    host_peak_bytes: int | None = None
    """RAM of the rank's process on its host; None where the trace did not follow it."""
    host_low_bytes: int | None = None
    host_high_bytes: int | None = None
    host_pinned_peak_bytes: int | None = None
    same_as: int | None = None
    """The lowest rank that asks for exactly the same memory; None when this is the lowest."""


class Estimate(InNotebooks, msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of a job on a card, with the reasons."""

    schema_version: int = SCHEMA_VERSION
    memplan_version: str
    torch_version: str
    gpu: GpuInfo | None
    """None when no card was named and the machine has none."""
    fits: bool | None
    """Whether `high_bytes` is within the card; None without a card."""
    peak_bytes: int
    """The process peak, what nvidia-smi would show: reserved plus context; with it what inference
    engines hold outside of PyTorch's allocator."""
    low_bytes: int
    high_bytes: int
    spare_bytes: int | None
    """Card minus `peak_bytes` when it fits; None otherwise."""
    missing_bytes: int | None
    """`high_bytes` minus the card when it does not fit; None otherwise."""
    reserved_peak_bytes: int
    reserved_low_bytes: int
    reserved_high_bytes: int
    allocated_peak_bytes: int
    allocated_low_bytes: int
    allocated_high_bytes: int
    requested_peak_bytes: int
    breakdown: Breakdown
    gathered_parameter_bytes: int
    """The part of the temporaries that are whole parameters, gathered by FSDP."""
    peak: PeakPoint
    allocated_peak: PeakPoint = PeakPoint(event=-1)
    """Where the job stands when most is allocated: usually not at the reserved peak."""
    phases: list[PhasePeak] = []
    """The phases that the capture saw, in the order of a step."""
    stages: list[StagePeak] = []
    """The stages of a job that also generates text; empty for one that only trains."""
    engines: list[EngineEstimate] = []
    """Inference engines that share the card."""
    largest: list[TensorInfo]
    """The ten groups of like storages that hold most at the peak, the largest first."""
    held: list[HeldPart] = []
    """All that is held at the peak, by role, module and source line, the largest first. The last
    row may be what is left over, with an empty role; together they are what tensors asked for."""
    assumptions: list[Assumption]
    kernels: list[KernelChoice]
    curve: MemoryCurve
    steps: int
    """Optimizer steps that the script ran while it was captured."""
    stop_reason: str
    method: str
    """How the trace came to be: `fake-cuda`, `fake-cpu` or `observed`."""
    alloc_conf: str
    """Allocator settings in force, in the syntax of `PYTORCH_ALLOC_CONF`."""
    num_alloc_retries: int
    """How often the allocator had to return cached segments to go on, on this card."""
    events: int
    """Number of events in the capture."""
    repeated_steps: int = 0
    """Steps that were simulated beyond those captured, like the steady ones of these; `peak` and
    `curve` count their events too."""
    card_processes: int = 1
    """Processes of the job that share the card; `fits`, `spare_bytes` and `missing_bytes` count
    them all, every other figure is of one."""
    host_peak_bytes: int | None = None
    """RAM of the job's process on the host, its workers included; None where the trace did not
    follow it."""
    host_low_bytes: int | None = None
    host_high_bytes: int | None = None
    host_pinned_peak_bytes: int | None = None
    """Page-locked memory, a part of it."""
    host_breakdown: HostBreakdown | None = None
    host_processes: int
    """Processes of the job that share one host."""
    host_node_peak_bytes: int | None = None
    """RAM of them all, at the peak of each. Where several ranks were captured: of the node that
    needs most, ranks between two captured ones being taken to need what the larger does."""
    host_node_low_bytes: int | None = None
    host_node_high_bytes: int | None = None
    capture_peak_bytes: int
    """Resident memory of the capture itself."""
    command: list[str]
    notes: list[str]
    step_seconds: float | None = None
    """A steady step's time on the card; None where the trace has none, or no card is known."""
    step_low_seconds: float | None = None
    step_high_seconds: float | None = None
    """80 % of measured steps lay between bounds as wide as these."""
    host_launch_seconds: float | None = None
    """Time that the host needs to launch the step. If near the step's, that waits for it."""
    exposed_communication_seconds: float | None = None
    """By how much the step would be shorter without its collectives; None if it has none."""
    input_seconds: float | None = None
    """What the step's batches took one process of the data loader on the CPU of the capture; None
    where no loader was seen, or none could be measured."""
    exposed_input_seconds: float | None = None
    """The part that the loader's workers cannot do while a step runs: all of it without workers. It
    comes on top of `step_seconds`."""
    batches_per_step: float | None = None
    """Batches that the rank trains on in a step, as the capture saw them."""
    samples_per_step: float | None = None
    """Samples of these batches; None where no data loader of PyTorch's gave them."""
    model_flops_utilisation: float | None = None
    """Operations of the model's products, those computed again not counted, over the peak rate of
    their dtype and the step's time."""
    peak_rate: str = ""
    """The peak rate that is meant: `bf16`, `fp16`, `fp32`."""
    kernel_seconds: dict[str, float] = {}
    """The device's time in a step by kind of kernel, the longest first; what overlaps counts in
    full."""
    rank: int | None = None
    """The rank that this is about; None for a job of one process."""
    world_size: int | None = None
    ranks: list[RankEstimate] = []
    """Every rank that was captured, when several were; this is the one with the largest peak."""
