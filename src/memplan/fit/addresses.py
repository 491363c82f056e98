"""The lever of planned addresses: an arena laid out ahead, where gaps are what does not fit."""

from __future__ import annotations

from dataclasses import replace

from memplan.capturing.options import STEPS_TO_PLAN
from memplan.fit.answer import Lever
from memplan.fit.judge import Verdict
from memplan.fit.state import State
from memplan.layout.static_plan import static_plan
from memplan.types.device import DeviceProfile
from memplan.types.errors import NoAnswerError
from memplan.types.estimate import Estimate
from memplan.types.trace import PRIVATE_POOLS, Trace
from memplan.worker.failure import CaptureFailedError
from memplan.worker.planned_addresses import estimate_under

_SECONDS = 10.0
"""The longest search for a layout."""
_POOLS = "No addresses are planned: the job has memory pools of its own."


def with_planned_addresses(state: State) -> State:
    """The job with an address for each request of its steady step: where it does not fit for gaps,
    or fits only as PyTorch's allocator gives cached memory back in every step; if it then fits
    without. As it is otherwise, and where somebody has chosen the allocator.

    It is the last lever: what changes requests comes before it. The steady step is captured with
    more steps than usual, which show what lives from one into the next.
    """
    chosen = state.verdict.estimate.alloc_conf and not state.verdict.alloc_conf
    if chosen or not _gaps_are_missing(state.verdict.estimate, state.job.profile):
        return state
    if _has_pools(state.captured.trace):
        return state.with_note(_POOLS)
    job = state.job
    job.search.say("planning addresses", 1)
    job.search.tried.append("addresses")
    try:
        captured = job.capture(job.program, state.plan, quiet=True, steps=STEPS_TO_PLAN)
        job.search.captured()
        if _has_pools(captured.trace):
            return state.with_note(_POOLS)
        found = static_plan(captured.trace, seconds=job.search.solving_seconds(_SECONDS), device=0)
    except (CaptureFailedError, NoAnswerError):
        return state
    under_plan = estimate_under(captured.trace, job.profile, found.part, found.requests)
    if not under_plan.fits:
        return state
    saved = state.verdict.estimate.reserved_peak_bytes - under_plan.reserved_peak_bytes
    plan = state.with_parts(allocation=found.part).plan
    after = replace(
        state, plan=plan, captured=captured, verdict=Verdict(under_plan, addresses=True)
    )
    lever = Lever(
        kind="addresses",
        name=f"{found.planned} planned",
        values=found.planned,
        saved_bytes=max(saved, 0),
        bound="",
    )
    return after.with_lever(lever)


def _has_pools(trace: Trace) -> bool:
    return bool((trace.events.stream >= PRIVATE_POOLS).any())


def _gaps_are_missing(found: Estimate, profile: DeviceProfile) -> bool:
    """Whether the tensors alone fit, at the high bound, and the gaps beside them do not."""
    gaps = found.reserved_high_bytes - found.allocated_high_bytes
    tensors = found.high_bytes - gaps <= profile.total_memory_bytes
    return tensors and not (found.fits and found.num_alloc_retries == 0)
