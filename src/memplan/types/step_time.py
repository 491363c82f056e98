"""How long a training step takes, as estimated, and what its collectives take."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class InputTime(msgspec.Struct, frozen=True):
    """What a data loader took on the CPU of the machine that captured the job."""

    batch_seconds: _Amount
    """Seconds of one process for one batch."""
    batches: _Amount
    """Batches that a step takes from the loader."""
    workers: Annotated[int, msgspec.Meta(ge=0)]
    """Processes that prepare batches ahead; 0: the job's own does, between steps."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """A steady step's time on one card. Seconds."""

    seconds: float
    low_seconds: float
    high_seconds: float
    """80 % of measured steps lay between bounds as wide as these."""
    host_seconds: float
    """What the host takes to launch the step; as long as the step itself, or longer: the step is
    bound by the host."""
    exposed_communication_seconds: float | None
    """By how much the step would be shorter without its collectives; None if it has none."""
    input_seconds: float | None
    """What its batches took one process on the machine of the capture; None where no data loader
    was seen."""
    exposed_input_seconds: float | None
    """The part that the loader's workers cannot do during a step; not in `seconds`."""
    model_flops_utilisation: float | None
    """Operations of the model's products, those computed again not counted, by the peak rate of
    their dtype and the step's seconds; None where it has none."""
    peak_rate: str
    """The peak rate that is meant: `bf16`, `fp16`, `fp32`."""
    kernel_seconds: dict[str, float]
    """Seconds by kind of kernel, the longest first. Kernels that overlap count in full."""


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives of one kind in one group of ranks, in one step."""

    kind: str
    """`all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, `broadcast`, `send` and so on."""
    ranks: int
    """Number of ranks in the group."""
    nodes: int
    count: float
    """A whole number, unless several steps that take turns are counted together."""
    bytes: int
    """Bytes of the data, as nccl-tests counts it: of all ranks for gather and scatter."""
    seconds: float
    exposed_seconds: float
    """By how much the step would be shorter without these collectives alone. Because they may hide
    behind each other's waits, the sum of several may differ from what all of them expose
    together."""
