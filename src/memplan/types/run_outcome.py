"""The `RunOutcome`: what `memplan run --stats` writes (docs/run.md)."""

from __future__ import annotations

import msgspec

SCHEMA_VERSION = 1


class PlanSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """A plan came into effect."""

    step: int
    """Optimizer steps before it."""
    device: int
    arena_bytes: int
    requests: int


class DeviceOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A device that the job asked for memory. Peaks are those since the first plan came into
    effect, or of the run."""

    device: int
    reserved_peak_bytes: int
    allocated_peak_bytes: int
    reserved_peak_without_bytes: int | None
    """The reserved peak of PyTorch's allocator, simulated; None without recorded requests."""
    without_from_steps: int
    """The job's first steps, that this was simulated from."""
    counters: dict[str, int]
    """The allocator's, bytes and counts."""


class PlanningOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What plans of this run cost and save."""

    seconds: float
    """Seconds of the card in all."""
    step_seconds_before: float
    step_seconds: float
    freed_share: float
    """The share of the card's memory that is freed."""
    saved_seconds_per_step: float
    paid_after_steps: int | None
    """None where nothing is saved."""


class EarlyUpdates(msgspec.Struct, kw_only=True):
    """What came of weights' updates in the backward pass."""

    planned: int
    """Parameters that the plan updates in backward."""
    parameters: int = 0
    """The most parameters that were updated so in a step."""
    steps: int = 0
    """Number of steps with such updates."""
    ended: str = ""
    """Why they are made by the optimizer's step instead, from the first step or from then on."""


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's memory came to."""

    schema_version: int = SCHEMA_VERSION
    memplan_version: str
    plan: str | None
    """The file that was in effect from the beginning."""
    steps: int | None = None
    """Optimizer steps; None where PyTorch's own allocator served the job and nobody counted."""
    hit_rate: float | None = None
    """Part of the requests that plans foresaw; None without a plan."""
    requests: int = 0
    plans: list[PlanSwitch] = []
    devices: list[DeviceOutcome] = []
    planning: PlanningOutcome | None = None
    """None where no plan was made in this run, or no step is known."""
    hook_seconds_per_step: float | None = None
    """CPU time; None as `steps`."""
    early_updates: EarlyUpdates | None = None
    """None without a part `order` of the plan."""
    notes: list[str] = []
    """What was said."""
