"""What a job's memory came to: one line for people, and JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec

from memplan import __version__
from memplan.report.text import format_bytes
from memplan.runtime.planned.job import Job
from memplan.runtime.planned.worth import payback
from memplan.simulate import AllocatorSettings, simulate
from memplan.types.errors import MemplanError
from memplan.types.output_file import write_file
from memplan.types.run_outcome import DeviceOutcome, EarlyUpdates, PlanningOutcome, RunOutcome
from memplan.types.trace import EventKind, Trace


def outcome(
    job: Job | None,
    plan: str = "",
    *,
    notes: list[str] | None = None,
    in_backward: EarlyUpdates | None = None,
) -> RunOutcome:
    """`job`: None where PyTorch's ordinary allocator served. `plan`: the file that was in effect
    from the beginning. `notes`: what was said, if that is more than the job knows."""
    found = RunOutcome(
        memplan_version=__version__,
        plan=plan or None,
        early_updates=in_backward,
        notes=notes if notes is not None else job.account.notes if job is not None else [],
    )
    if job is None:
        return found
    account, devices = job.account, [_device(job, device) for device in _used(job)]
    served = job.hit_rate.total() if job.hit_rate is not None else None
    return msgspec.structs.replace(
        found,
        steps=account.steps,
        hit_rate=round(served.rate, 6) if served is not None else None,
        requests=served.all if served is not None else 0,
        plans=list(account.switches),
        devices=devices,
        planning=_planning(job, devices),
        hook_seconds_per_step=round(account.hook_nanoseconds / max(account.steps, 1) / 1e9, 9),
    )


def _planning(job: Job, devices: list[DeviceOutcome]) -> PlanningOutcome | None:
    before, after = job.account.step_seconds_before, job.worth.usual_seconds
    if not job.account.planning_seconds or before is None or after is None:
        return None
    freed = [
        device.reserved_peak_without_bytes - device.reserved_peak_bytes
        for device in devices
        if device.reserved_peak_without_bytes is not None
    ]
    share = max([0, *freed]) / job.card_bytes if job.card_bytes else 0.0
    return payback(job.account.planning_seconds, before, after, share)


def _used(job: Job) -> list[int]:
    """Devices that the job has asked for memory."""
    found = {device: job.library.statistics(device) for device in job.devices}
    return [
        device
        for device, seen in found.items()
        if seen is not None and (seen.mallocs or seen.reserved_peak)
    ]


def _device(job: Job, device: int) -> DeviceOutcome:
    found = job.library.statistics(device)
    assert found is not None
    ours = job.peaks.ours(device)
    without, steps = _without(job.recorded, device)
    counts = found.as_dict()
    for name in ("allocated_peak", "requested_peak", "reserved_peak"):
        del counts[name]  # of whatever was reset last
    return DeviceOutcome(
        device=device,
        reserved_peak_bytes=ours["reserved_peak"],
        allocated_peak_bytes=ours["allocated_peak"],
        reserved_peak_without_bytes=without,
        without_from_steps=steps,
        counters=counts,
    )


def _without(trace: Trace | None, device: int) -> tuple[int | None, int]:
    """The reserved peak of PyTorch's own allocator, simulated from recorded requests, and of how
    many of the job's first steps; None where nothing was recorded."""
    if trace is None:
        return None, 0
    asked = trace.events.device[trace.events.kind == EventKind.ALLOC]
    if not (asked == device).any():
        return None, 0
    try:
        settings = AllocatorSettings.parse(trace.meta.alloc_conf)
        timeline = simulate(trace, settings, device=device)
    except MemplanError:  # settings that the simulator does not know
        return None, 0
    return int(timeline.reserved.max(initial=0)), trace.meta.optimizer_steps


def save_outcome(found: RunOutcome, path: Path, *, overwrite: bool = False) -> None:
    """Write the JSON. Raises UsageError when it cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
    write_file(path, [text], overwrite=overwrite)


def line(found: RunOutcome, price: float | None = None) -> str:
    """The outcome in one line; empty for a job that asked for no device memory. `price`: of the GPU
    for an hour."""
    if not found.devices:
        return ""
    peak = max(found.devices, key=lambda device: device.reserved_peak_bytes)
    words = f"peak reserved {format_bytes(peak.reserved_peak_bytes)}"
    without = peak.reserved_peak_without_bytes
    if found.plans:
        first = found.plans[-1].step
        words += f" with the plan (from step {first} on)" if first else " with the plan"
    else:
        words += ", no plan in effect"
    if without is not None and found.plans:
        words += (
            f", {format_bytes(without)} without it (simulated from the first "
            f"{peak.without_from_steps} steps)"
        )
    if found.hit_rate is not None:
        words += f", hit rate {found.hit_rate:.1%}"
    if len(found.devices) > 1:
        words += f" (device {peak.device} of {len(found.devices)})"
    if found.planning is not None:
        words += f"; {_worth(found.planning, price)}"
    return words


def _worth(planning: PlanningOutcome, price: float | None) -> str:
    seconds, steps = planning.seconds, planning.paid_after_steps
    said = f"planning took {seconds:.1f} s"
    if price is not None:
        said += f" ({price * seconds / 3600:,.3f} at {price:g}/h)"
    if steps is None:
        return said + ", not paid for: steps are not shorter, and no memory is free"
    shorter = (planning.step_seconds_before - planning.step_seconds) * 1e3
    freed = f"{planning.freed_share:.1%} of the card"
    return f"{said}, paid for by {steps:,} steps (each saves {shorter:.1f} ms and {freed})"
