"""The `Difference`: what makes one job's peak higher than another's. `docs/json.md` describes it.

All sizes are bytes of one process on one device. Each of the three lists of parts splits both peaks
completely, so that its changes sum to the change of the peak.
"""

from __future__ import annotations

import msgspec

from memplan.types.notebook import InNotebooks

SCHEMA_VERSION = 1


class ComparedPeak(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two."""

    file: str
    command: list[str]
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    fits: bool | None


class ChangedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A category, module or source line, and what the two peaks hold for it."""

    name: str
    """The name of the part; in parentheses if it is not a module (`(outside modules: inputs)`);
    empty for bytes whose place is not known."""
    before_bytes: int
    after_bytes: int
    change_bytes: int


class Attributed(msgspec.Struct, frozen=True, kw_only=True):
    """The share of the peak's change that has a place, by modules and by lines; 1.0 where the peaks
    are equal and the part without a place did not change either."""

    categories: float
    modules: float
    sources: float


class Difference(InNotebooks, msgspec.Struct, frozen=True, kw_only=True):
    """Two peaks beside each other."""

    schema_version: int = SCHEMA_VERSION
    memplan_version: str
    before: ComparedPeak
    after: ComparedPeak
    change_bytes: int
    related: bool | None
    """Whether the two are jobs alike, by their modules and source lines; None where one of them
    knows neither."""
    categories: list[ChangedPart]
    """Categories as in an estimate's `breakdown`."""
    modules: list[ChangedPart]
    sources: list[ChangedPart]
    """Each list: what changed most first, in either direction."""
    attributed: Attributed
    notes: list[str]
