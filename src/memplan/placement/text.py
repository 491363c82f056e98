"""A placement for a person."""

from __future__ import annotations

from memplan.placement.answer import Placement, Slot
from memplan.report.text import clean, format_bytes


def text(found: Placement) -> str:
    """The first line is the answer."""
    if found.card is None:
        message, hint = refusal(found, mig=False)
        return clean(message) + "\n" + (f"  try  {hint}\n" if hint else "")
    count = f"{found.gpus} x " if found.gpus > 1 else ""
    rows = [
        ("card", _slot_text(found.card)),
        ("MIG slice", _slot_text(found.mig) if found.mig else ""),
        ("nodes", f"{found.nodes} of {found.gpus_per_node} GPUs" if found.gpus > 1 else ""),
        ("host RAM", _host_text(found)),
    ]
    lines = [f"{count}{found.card.card}: {_room(found.card)}", ""]
    lines += [f"  {name:<11}{said}" for name, said in rows if said]
    lines += [""] * bool(found.notes) + [f"note: {clean(note)}" for note in found.notes]
    return "\n".join(lines) + "\n"


def refusal(found: Placement, *, mig: bool) -> tuple[str, str]:
    """Why there is no card, or no slice of one, and what to try."""
    needed = format_bytes(found.needed_bytes)
    if not mig:
        message = f"no card of {found.captured_for}'s compute capability holds {needed}"
        return message, f"memplan fit --gpu {found.captured_for} …, and place its answer"
    if found.gpus * found.processes_per_node > 1:
        return "a MIG slice holds one process, and this job has several", "leave --mig out"
    return f"no MIG slice with known memory holds {needed}", "leave --mig out"


def _slot_text(slot: Slot) -> str:
    name = f"{slot.mig} of {slot.card}" if slot.mig else f"{slot.card} ({slot.device_name})"
    return f"{name}, {format_bytes(slot.total_bytes)}"


def _room(slot: Slot) -> str:
    return (
        f"{format_bytes(slot.needed_bytes)} of {format_bytes(slot.total_bytes)} at the high bound"
    )


def _host_text(found: Placement) -> str:
    if found.host_bytes_per_node is None:
        return ""
    each = " a node" if found.nodes > 1 else ""
    return f"{format_bytes(found.host_bytes_per_node)}{each} at the high bound"
