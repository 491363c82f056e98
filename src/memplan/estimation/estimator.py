"""`estimate`: the whole answer, from a trace and a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from memplan import __version__
from memplan.estimation import choices
from memplan.estimation.communication import (
    Bounds,
    communication_bytes,
    communication_notes,
)
from memplan.estimation.contents import Contents, phase_peaks, point_at
from memplan.estimation.curve import thin
from memplan.estimation.engines import engine_estimates, engine_notes, stage_peaks
from memplan.estimation.host import host_memory
from memplan.estimation.interval import CachingPlayer, Interval, Player, find_interval
from memplan.estimation.width import why_wide
from memplan.simulate import AllocatorSettings, Settled, settled
from memplan.timing.step import step_time
from memplan.types.device import ASSUMED, DEFAULT_PROFILE, DeviceProfile, captured_for
from memplan.types.device_corrections import MEASURED_HERE
from memplan.types.estimate import Estimate, GpuInfo
from memplan.types.trace import Assumption, Trace


def estimate(
    trace: Trace,
    profile: DeviceProfile | None = None,
    settings: AllocatorSettings | None = None,
    player: Callable[[DeviceProfile], Player] | None = None,
) -> Estimate:
    """Peak memory of a captured job.

    Args:
        trace: the job; its first device is the one that counts.
        profile: the card of the verdict. Without one `fits` is None, and the context is that of
            the card that the job saw while it was captured.
        settings: the allocator's; by default those that the trace carries.
        player: for what is left of a card beside NCCL and other processes, the replays under
            another allocator than PyTorch's own.

    Raises:
        UsageError: allocator settings that PyTorch would refuse.
        NoAnswerError: settings that cannot be simulated.
        FormatError: a trace whose events cannot be.
    """
    if settings is None:
        settings = AllocatorSettings.parse(trace.meta.alloc_conf)
    card = profile or captured_for(trace.meta.gpu)
    communication = communication_bytes(trace.meta.communicators, card.capability)
    part = _left_for_tensors(card, communication, trace)
    steady = settled(trace, settings)
    limited = profile is not None
    if player is None:
        total = part.total_memory_bytes if limited else None
        replays: Player = CachingPlayer(settings, part, total)
    else:
        replays = player(part)
    interval = find_interval(
        steady.trace, part, replays, limited=limited, least=steady.least_reserved_bytes
    )

    def fits(other: Trace) -> bool:
        found = find_interval(other, part, replays, limited=limited)
        return _missing_bytes(found, settings, part) == 0

    return Estimate(
        memplan_version=__version__,
        notes=[
            *_notes(interval, profile, card),
            *communication_notes(trace.meta.communicators, card.capability),
            *why_wide(trace, interval),
            *choices.note(trace),
            *engine_notes(trace, profile),
            *_repetitions(steady),
            *trace.meta.notes,
        ],
        stages=stage_peaks(steady, interval, part),
        engines=engine_estimates(steady, interval, part if limited else None, fits),
        **_capture(trace, steady),
        **_verdict(interval, settings, profile, card, part, trace.meta.card_processes),
        **_peaks(interval),
        **_contents(steady, interval, card, communication),
        **_host(trace, settings),
        **_step(trace, profile),
    )


def fits_card(trace: Trace, card: DeviceProfile) -> bool:
    """What `estimate` says of it, in less time. Raises as it does."""
    settings = AllocatorSettings.parse(trace.meta.alloc_conf)
    communication = communication_bytes(trace.meta.communicators, card.capability)
    part = _left_for_tensors(card, communication, trace)
    steady = settled(trace, settings)
    interval = find_interval(
        steady.trace,
        part,
        CachingPlayer(settings, part, part.total_memory_bytes),
        limited=True,
        least=steady.least_reserved_bytes,
    )
    return _missing_bytes(interval, settings, part) == 0


def _left_for_tensors(card: DeviceProfile, communication: Bounds, trace: Trace) -> DeviceProfile:
    """What each of the processes that share the card has of it. Beside its own context, NCCL's
    memory and the contexts of engines that are processes of their own lie outside PyTorch's."""
    contexts = 1 + _processes_of_engines(trace)
    return msgspec.structs.replace(
        card,
        total_memory_bytes=card.total_memory_bytes // trace.meta.card_processes,
        context_bytes=contexts * card.context_bytes + communication.expected,
        context_low_bytes=contexts * card.context_low_bytes + communication.low,
        context_high_bytes=contexts * card.context_high_bytes + communication.high,
    )


def _capture(trace: Trace, steady: Settled) -> dict[str, Any]:
    meta = trace.meta
    unsettled = [Assumption("steady-state", steady.unsettled)] if steady.unsettled else []
    return {
        "torch_version": meta.torch_version,
        "assumptions": [*meta.assumptions, *unsettled],
        "kernels": list(meta.kernels),
        "steps": meta.optimizer_steps,
        "stop_reason": meta.stop_reason,
        "method": meta.method,
        "alloc_conf": meta.alloc_conf,
        "events": len(trace),
        "repeated_steps": steady.rounds * steady.steps,
        "capture_peak_bytes": meta.capture_peak_bytes,
        "command": list(meta.command),
    }


def _verdict(
    interval: Interval,
    settings: AllocatorSettings,
    profile: DeviceProfile | None,
    card: DeviceProfile,
    part: DeviceProfile,
    processes: int,
) -> dict[str, Any]:
    missing = _missing_bytes(interval, settings, part) * processes
    fits = None if profile is None else missing == 0
    low, peak, high = interval.peak
    return {
        "gpu": None if profile is None else gpu_info(profile),
        "fits": fits,
        "peak_bytes": peak,
        "low_bytes": low,
        "high_bytes": high,
        "spare_bytes": card.total_memory_bytes - peak * processes if fits else None,
        "missing_bytes": missing if fits is False else None,
        "card_processes": processes,
    }


def _peaks(interval: Interval) -> dict[str, Any]:
    timeline = interval.expected.timeline
    return {
        "reserved_peak_bytes": interval.reserved[1],
        "reserved_low_bytes": interval.reserved[0],
        "reserved_high_bytes": interval.reserved[2],
        "allocated_peak_bytes": interval.allocated[1],
        "allocated_low_bytes": interval.allocated[0],
        "allocated_high_bytes": interval.allocated[2],
        "requested_peak_bytes": timeline.requested_peak_bytes,
        "num_alloc_retries": timeline.num_alloc_retries,
    }


def _contents(
    steady: Settled, interval: Interval, card: DeviceProfile, communication: Bounds
) -> dict[str, Any]:
    timeline = interval.expected.timeline
    contents = Contents(steady.trace, timeline, timeline.fullest_event)
    return {
        "breakdown": contents.breakdown(
            interval.held[1],
            card.context_bytes,
            communication.expected,
            _processes_of_engines(steady.trace) * card.context_bytes,
        ),
        "gathered_parameter_bytes": contents.gathered_bytes(),
        "peak": contents.point(),
        "allocated_peak": point_at(steady.trace, timeline.allocated_peak_event),
        "phases": phase_peaks(steady.trace, timeline),
        "largest": contents.largest(),
        "held": contents.held(),
        "curve": thin(steady.trace, timeline),
    }


def _host(trace: Trace, settings: AllocatorSettings) -> dict[str, Any]:
    host, meta = host_memory(trace, settings), trace.meta.host
    processes = 1 if meta is None else meta.local_processes
    if host is None:
        return {"host_processes": processes}
    return {
        "host_peak_bytes": host.peak,
        "host_low_bytes": host.low,
        "host_high_bytes": host.high,
        "host_pinned_peak_bytes": host.pinned,
        "host_breakdown": host.breakdown,
        "host_processes": processes,
        "host_node_peak_bytes": host.peak * processes,
        "host_node_low_bytes": host.low * processes,
        "host_node_high_bytes": host.high * processes,
    }


def _step(trace: Trace, profile: DeviceProfile | None) -> dict[str, Any]:
    found = None if profile is None else step_time(trace, profile)
    if found is None:
        return {}
    return {
        "step_seconds": found.seconds,
        "step_low_seconds": found.low_seconds,
        "step_high_seconds": found.high_seconds,
        "host_launch_seconds": found.host_seconds,
        "exposed_communication_seconds": found.exposed_communication_seconds,
        "input_seconds": found.input_seconds,
        "exposed_input_seconds": found.exposed_input_seconds,
        "batches_per_step": trace.meta.batches_per_step,
        "samples_per_step": trace.meta.samples_per_step,
        "model_flops_utilisation": found.model_flops_utilisation,
        "peak_rate": found.peak_rate,
        "kernel_seconds": found.kernel_seconds,
    }


def _repetitions(steady: Settled) -> list[str]:
    more = steady.rounds * steady.steps
    said = []
    if steady.turns:
        said = [
            f"{steady.turns:,} batches of loops that evaluate were simulated, made up from those "
            "captured"
        ]
    if steady.orders > 1:
        said.append(
            "no seed fixes the order of the data loader's batches, so each run of the job has "
            f"another, and fragments otherwise: the answer is for the worst of {steady.orders}, "
            "and the range spans them; torch.manual_seed() in the script narrows it"
        )
    if steady.of_batches:
        return [
            f"{more:,} steps on batches of the data loader's other sizes were simulated, made up "
            "from those captured",
            *said,
        ]
    if more:
        said.append(
            f"the allocator was simulated for {more} step{'s' if more > 1 else ''} more than were "
            "captured, like the last of these, because what it reserves grew until then"
        )
    return said


def _missing_bytes(interval: Interval, settings: AllocatorSettings, card: DeviceProfile) -> int:
    """How much larger the room must be for the high bound to fit; 0 when it does."""
    total = card.total_memory_bytes
    missing = max(interval.peak[2] - total, 0)
    if settings.per_process_memory_fraction < 1.0:
        allowed = int(total * settings.per_process_memory_fraction)
        missing = max(missing, interval.reserved[2] - allowed)
    return missing if interval.expected.fits and interval.high.fits else max(missing, 1)


def _processes_of_engines(trace: Trace) -> int:
    return sum(engine.separate for engine in trace.meta.engines)


def gpu_info(profile: DeviceProfile) -> GpuInfo:
    """The card as answers name it."""
    return GpuInfo(
        name=profile.name,
        device_name=profile.device_name,
        capability=profile.capability_text,
        total_bytes=profile.total_memory_bytes,
        context_bytes=profile.context_bytes,
        context_low_bytes=profile.context_low_bytes,
        context_high_bytes=profile.context_high_bytes,
    )


def _notes(interval: Interval, profile: DeviceProfile | None, card: DeviceProfile) -> list[str]:
    if profile is None:
        assumed = (
            ", which is assumed where no card is known" if card.name == DEFAULT_PROFILE else ""
        )
        return [
            f"No card is known, so there is no verdict: the script saw {card.device_name} "
            f"({card.name}){assumed}. --gpu, before the script, names another."
        ]
    notes = [
        f"{what} of {card.name}: {said}"
        for what in ("context", "kernels")
        if (said := card.sources.get(what, "")).startswith(MEASURED_HERE)
    ]
    if (rates := card.sources.get("rates", "")).startswith(ASSUMED):
        notes.append(f"A size names no card: times are those of {rates.removeprefix(ASSUMED)}.")
    if interval.high.fits and (interval.high.squeezed or interval.expected.squeezed):
        return [
            *notes,
            "It fits, but the card fills up: PyTorch then has to free memory that it keeps for "
            "reuse, and kernels get smaller workspaces. Expect slower steps. No answer is less "
            "sure (docs/accuracy.md).",
        ]
    return notes
