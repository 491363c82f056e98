"""Which card of its node a process puts its memory on, and how many processes do so.

A script that forgets `torch.cuda.set_device` puts what every process of a node holds on card 0.
Seen from a single rank that is hard to tell: rank 0 uses its own card anyway. So a rank that uses
another one's card, and rank 0 of a script that never chose a device, have a second rank asked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from memplan.capturing.distributed import peers
from memplan.types.errors import CaptureError
from memplan.types.trace import EventKind, Trace

if TYPE_CHECKING:
    import torch

    from memplan.capturing.options import RankPlace

KEY = "card"
"""What other ranks are asked for: the CUDA index of the card that they use."""


def own_index(place: RankPlace, devices: int) -> int:
    """CUDA index of the card that is number 0 while the process is captured."""
    return place.local_rank if place.local_rank < devices else 0


def tell_of(module: torch.nn.Module, device_type: str) -> None:
    """Answer another rank that asked, once a module with memory on the device is called."""
    for parameter in module.parameters():
        if parameter.device.type == device_type:
            peers.current().tell(KEY, parameter.device.index or 0)
            return


def with_card(trace: Trace, place: RankPlace, devices: int, *, chosen: bool) -> Trace:
    """The trace with the card that the process uses most as number 0, and in `meta` how many
    processes of the job use that one. `chosen`: whether the script has chosen a device."""
    own = own_index(place, devices)
    number = _largest(trace)
    index = own if number == 0 else 0 if number == own else number
    peers.current().tell(KEY, index)
    processes, notes = 1, []
    if devices < place.local_world_size and place.gpus is not None:
        processes = -(-place.local_world_size // devices)
        notes.append(
            f"CUDA_VISIBLE_DEVICES leaves the {place.local_world_size} processes of a node "
            f"{devices} GPU{'s' if devices > 1 else ''}: {processes} share one, and all are counted"
        )
    meant = place.local_rank % devices  # as scripts share fewer GPUs out
    if index != meant or (meant == 0 and devices > 1 and not chosen):
        told = _ask(place, index if index != meant else 1)
        if told == index or (told is None and index != meant):
            processes = place.local_world_size
            notes.append(_shared(place, index))
    trace = _renumbered(trace, number) if number else trace
    if number == 0:
        notes += _elsewhere(trace, place)
    meta = msgspec.structs.replace(
        trace.meta, card_processes=processes, notes=[*trace.meta.notes, *notes]
    )
    return replace(trace, meta=meta)


def _ask(place: RankPlace, local_rank: int) -> int | None:
    """The card of another process of this node; None where nobody can tell."""
    try:
        told: int | None = peers.current().ask(
            place.node * place.local_world_size + local_rank, KEY
        )
    except CaptureError:
        return None
    return told


def _shared(place: RankPlace, index: int) -> str:
    return (
        f"the {place.local_world_size} processes of a node put their memory on the same card, "
        f"cuda:{index}, and all of them are counted: torch.cuda.set_device(LOCAL_RANK) is missing"
    )


def _elsewhere(trace: Trace, place: RankPlace) -> list[str]:
    largest = int(trace.events.bytes[trace.events.device > 0].max(initial=0))
    if not largest:
        return []
    return [
        f"rank {place.rank} puts tensors (one of {largest >> 20} MiB) on another rank's card too, "
        "which is not in this rank's peak: map_location or a device index may be missing"
    ]


def _largest(trace: Trace) -> int:
    """The number of the device with the largest peak of bytes alive; 0 of those alike."""
    events = trace.events
    devices = np.unique(events.device)
    if len(devices) < 2:
        return int(devices[0]) if len(devices) else 0
    moved = np.where(events.kind == EventKind.ALLOC, events.bytes, 0)
    moved = np.where(events.kind == EventKind.FREE, -events.bytes, moved)
    peaks = {
        int(device): int(np.cumsum(moved[events.device == device]).max(initial=0))
        for device in devices
    }
    return max(sorted(peaks), key=lambda device: peaks[device])


def _renumbered(trace: Trace, number: int) -> Trace:
    """The trace with device `number` as 0, and 0 in its place. What moves no bytes is recorded as
    the process's own and stays so."""
    before = trace.events.device
    swapped = np.where(before == number, 0, np.where(before == 0, number, before))
    device = np.where(trace.events.bytes > 0, swapped, 0)
    events = replace(trace.events, device=device.astype(before.dtype))
    return replace(trace, events=events)
