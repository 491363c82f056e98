"""What a capture needs of the card at its best: with the allocator as it is set, or, where nobody
has set it, with expandable segments, which leave few gaps and cost no time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from memplan.estimation import estimate, fits_card
from memplan.types.device import DeviceProfile
from memplan.types.estimate import Estimate
from memplan.types.trace import Trace

EXPANDABLE = "expandable_segments:True"
WORTH = 0.01
"""Part of the peak below which a lever is not worth a part of the plan."""
_EXACT_TO = 0.004
"""The precision of `least_card`, as a fraction of the card's memory."""


@dataclass(frozen=True)
class Verdict:
    """An estimate, and the allocator settings that it takes; empty for those in force anyway."""

    estimate: Estimate
    alloc_conf: str = ""
    saved_bytes: int = 0
    """Reserved bytes that these settings save at the peak."""
    addresses: bool = False
    """Whether it is the estimate of a job with planned addresses."""

    @property
    def fits(self) -> bool:
        return bool(self.estimate.fits)


def judge(trace: Trace, profile: DeviceProfile, known: Estimate | None = None) -> Verdict:
    """The estimate of a trace, for the settings in force where it fits or they were chosen by
    somebody, else for expandable segments where these need less. `known`: the estimate for the
    settings in force, if there is one already."""
    plain = known or estimate(trace, profile)
    if plain.fits or plain.alloc_conf:
        return Verdict(plain)
    meta = msgspec.structs.replace(trace.meta, alloc_conf=EXPANDABLE)
    other = estimate(replace(trace, meta=meta), profile)
    if not other.fits and other.high_bytes >= plain.high_bytes:
        return Verdict(plain)
    saved = max(plain.reserved_peak_bytes - other.reserved_peak_bytes, 0)
    return Verdict(other, EXPANDABLE, saved)


def lowers(before: Verdict, after: Verdict) -> bool:
    """Whether the high bound is lower by enough to be worth a lever."""
    return after.estimate.high_bytes < (1 - WORTH) * before.estimate.high_bytes


def least_card(trace: Trace, profile: DeviceProfile, verdict: Verdict) -> int:
    """Bytes of the least card, like `profile` but for its size, that the job fits, within 0.4 %.

    A full card makes the allocator give cached segments back, so it is often much less than the
    high bound on a card with room. Planned addresses take the same on every card.
    """
    if verdict.addresses:
        return verdict.estimate.high_bytes
    meta = msgspec.structs.replace(trace.meta, alloc_conf=verdict.estimate.alloc_conf)
    job = replace(trace, meta=meta)
    total = profile.total_memory_bytes
    low, high = verdict.estimate.requested_peak_bytes, total
    if not verdict.fits:
        low, high = max(low, total), max(verdict.estimate.high_bytes, total)
    while high - low > _EXACT_TO * total:
        middle = (low + high) // 2
        card = msgspec.structs.replace(profile, total_memory_bytes=middle)
        if fits_card(job, card):
            high = middle
        else:
            low = middle
    return high


def moving_share(reference: Estimate, profile: DeviceProfile) -> float:
    """The fraction of the batch that should fit, were all but parameters, gradients, optimizer
    state and context in proportion to it."""
    parts = reference.breakdown
    fixed = parts.parameters + parts.gradients + parts.optimizer_state
    fixed += profile.context_high_bytes
    moving = max(reference.high_bytes - fixed, 1)
    return (profile.total_memory_bytes - fixed) / moving
