"""The `Sweep`: a ranking of configurations, as data; `docs/sweep.md` describes it."""

from __future__ import annotations

from typing import Literal

import msgspec

from memplan.types.estimate import Estimate

SCHEMA_VERSION = 1
By = Literal["cost", "seconds", "samples_per_second", "step_seconds", "peak_bytes"]
Status = Literal["fits", "fits_with_plan", "too_large", "impossible", "failed", "not_done"]
"""`impossible`: the launcher or the script refuses the combination. `failed`: there is no answer,
though there may be one another time: a worker died. `not_done`: the sweep was ended before."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about one combination, as a sweep keeps it in its folder.

    `fits`, `before` and `after` are as in the answer of `memplan fit`: `memplan place` reads it.
    """

    status: Status
    fits: bool
    before: Estimate | None = None
    """The estimate without a plan; None where there is no answer."""
    after: Estimate | None = None
    """The estimate with the plan, where one makes it fit."""
    added_fraction: float = 0.0
    """Time that the plan adds to a step."""
    plan: str | None = None
    """Path of the plan."""
    reason: str = ""
    hint: str = ""

    @property
    def estimate(self) -> Estimate | None:
        return self.after if self.after is not None else self.before


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One combination."""

    place: int | None = None
    """Rank from 1 on; None for a combination that does not fit or has no answer."""
    gpu: str
    values: dict[str, str]
    """Values of the options that were varied."""
    status: Status
    reason: str = ""
    hint: str = ""
    gpus: int | None = None
    """GPUs of the whole job."""
    peak_bytes: int | None = None
    low_bytes: int | None = None
    high_bytes: int | None = None
    total_bytes: int | None = None
    """Memory of the card."""
    step_seconds: float | None = None
    """None where the answer does not know it. With the time that a plan adds."""
    step_low_seconds: float | None = None
    step_high_seconds: float | None = None
    samples_per_step: int | None = None
    """Samples in a step of the whole job; None where nothing tells how many."""
    samples_per_second: float | None = None
    seconds: float | None = None
    """Seconds for the samples that were asked for."""
    cost: float | None = None
    """Cost of these samples, by the prices that were given."""
    added_fraction: float | None = None
    plan: str | None = None
    command: list[str]
    answer: str | None = None
    """Path of the answer, where a folder keeps it."""


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """All combinations, the best first."""

    schema_version: int = SCHEMA_VERSION
    memplan_version: str
    ranked_by: By
    complete: bool
    """False where a signal ended it: what was done until then."""
    rows: list[Row]
    captures: int
    """Processes that captured or fitted, this time."""
    kept: int
    """Combinations whose answer was found in the folder."""
    seconds: float
    notes: list[str]
