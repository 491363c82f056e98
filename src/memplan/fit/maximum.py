"""The `Maximum`: the largest value of an option that fits, as data (docs/maximize.md)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memplan.types.estimate import Estimate, GpuInfo

SCHEMA_VERSION = 1

LimitedBy = Literal["card", "script", "no_growth", "captures"]


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A value of the option that the script was captured with. Bytes are the process peak's."""

    value: int
    fits: bool | None
    """None where the script could not be captured with it."""
    peak_bytes: int = 0
    low_bytes: int = 0
    high_bytes: int = 0
    error: str = ""
    """Why it could not."""


class Maximum(msgspec.Struct, frozen=True, kw_only=True):
    """The largest value of a script's option with which its estimate fits the card."""

    schema_version: int = SCHEMA_VERSION
    memplan_version: str
    torch_version: str
    gpu: GpuInfo | None
    fits: bool
    """Whether any value does."""
    option: str
    """The option as the script takes it."""
    before: int
    """The value that the search began with."""
    value: int | None
    """The largest that was found to fit, by an estimate; None where none does."""
    multiple: int
    """Only multiples of this number were tried."""
    limited_by: LimitedBy
    """`card`: the next larger value tried does not fit. `script`: the script fails with it.
    `no_growth`: it asks for no more memory. `captures`: the search was ended by their number."""
    reason: str
    """The same in a sentence."""
    above: Tried | None
    """The smallest larger value that was tried."""
    tried: list[Tried]
    """All values tried, in the order of the captures."""
    estimate: Estimate
    """The estimate with `value`; with the smallest value that could be captured if none fits."""
    command: list[str]
    """The script with that value."""
    seconds: float
    notes: list[str]
