"""The `Placement`: what to ask a scheduler for, as data; `docs/place.md` describes it."""

from __future__ import annotations

import msgspec

SCHEMA_VERSION = 1


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """What holds one GPU's share of the job."""

    card: str
    device_name: str
    capability: str
    mig: str | None = None
    """The MIG profile, as `1g.10gb`; None for the whole card."""
    total_bytes: int
    needed_bytes: int
    """The high bound of what the job needs of it, the context of each process counted."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """What a job asks of a scheduler."""

    schema_version: int = SCHEMA_VERSION
    memplan_version: str
    fits: bool
    """Whether a known card, or the one that was named, holds the high bound."""
    card: Slot | None
    """The smallest that does; the named one where one was named."""
    mig: Slot | None = None
    """The smallest slice that does, where the job is one process."""
    captured_for: str
    """The card whose kernels the capture has."""
    needed_bytes: int
    """The high bound on the card of the capture."""
    nodes: int
    gpus_per_node: int
    processes_per_node: int
    host_bytes_per_node: int | None
    """The high bound of RAM; None where the capture did not follow the host."""
    command: list[str]
    notes: list[str]

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node
