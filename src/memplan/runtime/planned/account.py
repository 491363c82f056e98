"""When a job is planned, and what its memory did."""

from __future__ import annotations

from dataclasses import dataclass, field

from memplan.runtime.planned.recording import MOST_EVENTS
from memplan.types.trace import Trace


@dataclass(frozen=True)
class Policy:
    """When a job is planned."""

    most_steps: int = 8
    """Recorded at most, where no step repeats the one before."""
    least_rate: float = 0.8
    """Hit rate of a step below which it is low."""
    low_steps: int = 3
    """In a row, before the job is planned again."""
    seconds_between: float = 60.0
    """Between two plannings at least."""
    most_events: int = MOST_EVENTS


@dataclass
class Switch:
    """A plan came into effect."""

    step: int
    """Optimizer steps before it."""
    device: int
    arena_bytes: int
    requests: int


@dataclass
class Account:
    """What the job's memory did, for the outcome."""

    steps: int = 0
    switches: list[Switch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hook_nanoseconds: int = 0
    """Spent in hooks' own work, planning and its beginning and end excepted."""
    trace: Trace | None = None
    """Of the first steps."""
