"""The estimate beside what the card measures, while a job trains."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import memplan
from memplan.report.text import format_bytes, interval_text
from memplan.types.errors import UsageError
from memplan.types.estimate import Estimate

_GIB = 1 << 30
_log = logging.getLogger("memplan")


@dataclass(frozen=True)
class Measured:
    """Bytes of one card. Peaks are those since the process began, or since the job reset them."""

    allocated_peak: int
    reserved_peak: int
    reserved: int
    used: int
    """Bytes that all processes use, with what this one keeps for reuse."""
    total: int

    @property
    def needed(self) -> int:
        """What the card must hold at this job's peak: PyTorch could give the rest back."""
        return self.used - self.reserved + self.allocated_peak


def measure(device: object) -> Measured | None:
    """What the card of a job on `device` says; None where that is no CUDA device."""
    import torch

    place = torch.device(str(device))
    if place.type != "cuda" or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(place)
    return Measured(
        allocated_peak=torch.cuda.max_memory_allocated(place),
        reserved_peak=torch.cuda.max_memory_reserved(place),
        reserved=torch.cuda.memory_reserved(place),
        used=total - free,
        total=total,
    )


class Beside:
    """An estimate, and each N-th step's measurement beside it; warns once of each kind.

    Args:
        estimate: an `Estimate`, or a file: an answer (`memplan estimate --json`) or a trace.
        every: steps from one measurement to the next.
        warn_at: share of the card from which on it counts as nearly full.

    Raises UsageError for figures that are none, FormatError for a file that is no answer.
    """

    def __init__(self, estimate: Estimate | str | Path, every: int, warn_at: float) -> None:
        if every < 1 or not 0 < warn_at <= 1:
            raise UsageError(
                f"every={every}, warn_at={warn_at}", "a number of steps from 1 on, a share up to 1"
            )
        if not isinstance(estimate, Estimate):
            estimate = memplan.read_estimate(str(estimate))
        self.estimate = estimate
        self.every = every
        self.warn_at = warn_at
        self._said: set[str] = set()

    def begin(self, device: object) -> None:
        """Say before the first step what can be said then."""
        found, expected = measure(device), self.estimate
        if found is None:
            self._say("no card", f"no GPU: on {device} no memory is measured beside the estimate")
        elif expected.high_bytes > found.total:
            peak = interval_text(expected.low_bytes, expected.peak_bytes, expected.high_bytes)
            self._say("small card", f"peak {peak} of {format_bytes(found.total)} may not fit")

    def figures(self, step: int, device: object) -> dict[str, float]:
        """Figures for a logger, in GiB, of each N-th step; empty for other steps, and without a
        card."""
        found = measure(device) if step % self.every == 0 else None
        if found is None:
            return {}
        self._warn(found)
        expected = self.estimate
        return {
            "gpu_memory/reserved_peak_gib": found.reserved_peak / _GIB,
            "gpu_memory/reserved_estimate_gib": expected.reserved_peak_bytes / _GIB,
            "gpu_memory/reserved_estimate_high_gib": expected.reserved_high_bytes / _GIB,
            "gpu_memory/allocated_peak_gib": found.allocated_peak / _GIB,
            "gpu_memory/allocated_estimate_gib": expected.allocated_peak_bytes / _GIB,
            "gpu_memory/card_used_gib": found.used / _GIB,
        }

    def _warn(self, found: Measured) -> None:
        high = self.estimate.reserved_high_bytes
        if found.reserved_peak > high:
            more = format_bytes(found.reserved_peak)
            self._say(
                "above",
                f"{more} reserved, above the estimate's high bound of {format_bytes(high)}: "
                "is it of this job?",
            )
        if found.needed > self.warn_at * found.total:
            needed, total = format_bytes(found.needed), format_bytes(found.total)
            self._say("full", f"the card is nearly full: {needed} of {total} needed at the peak")

    def _say(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            _log.warning("memplan: %s", message)
