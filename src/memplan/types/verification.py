"""The `Verification`: a real run beside the estimate of its job (docs/verify.md)."""

from __future__ import annotations

import msgspec

from memplan.types.estimate import GpuInfo

SCHEMA_VERSION = 1


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A peak as measured, and the estimate's interval. Bytes."""

    name: str
    """`requested`, `allocated`, `reserved` or `process`."""
    real_bytes: int
    low_bytes: int
    expected_bytes: int
    high_bytes: int
    held: bool
    """Whether the real peak is within the interval."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a run."""

    bytes: int
    op: str
    module: str
    source: str
    phase: str
    step: int
    provenance: str


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The place where two sequences of requests diverge."""

    index: int
    """Requests before it that are the same."""
    real: Request | None
    """None where the real run asks for nothing more."""
    foreseen: Request | None
    bytes: int
    """Bytes of the real request minus those of the predicted one."""


class Surplus(msgspec.Struct, frozen=True, kw_only=True):
    """A size that one side asks for more often."""

    bytes: int
    times: int
    """How much more often it occurs in the real run; negative if less often."""
    places: list[str]


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What a real run showed of an estimate."""

    schema_version: int = SCHEMA_VERSION
    memplan_version: str
    torch_version: str
    """The version in the real run."""
    device_name: str
    gpu: GpuInfo | None
    holds: bool
    """Whether every measured peak is at most the estimate's high bound."""
    peaks: list[Comparison]
    requests_real: int
    requests_foreseen: int
    first: Divergence | None
    """The first divergence of the whole run; None where the shorter run has none."""
    steady: Divergence | None
    """The first divergence in a step that the next one repeats on both sides; else None."""
    steady_compared: bool
    """Whether both sides have such a step."""
    surplus: list[Surplus]
    """Most bytes first."""
    outside_bytes: int | None
    """Measured: of the process, not in PyTorch's segments at its peak."""
    num_alloc_retries: int
    calibrated: str
    """The file that the correction of the device profile was written to; empty without one."""
    notes: list[str]
