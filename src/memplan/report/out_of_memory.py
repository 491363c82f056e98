"""An `OomExplanation` for a person at a terminal; the first line is the answer."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from memplan.report.text import clean, format_bytes, short_op, shorten
from memplan.types.out_of_memory import OomExplanation, Remedy

_FRAMES = 6
_PHASES = {
    "setup": "setup, before the first forward",
    "before": "before the history began",
    "evaluation": "evaluation",
}


def out_of_memory_lines(answer: OomExplanation, next_command: str = "") -> Iterator[Text]:
    """The report's lines."""
    where = answer.source or "a place that was not recorded"
    doing = ", ".join(filter(None, (short_op(answer.op), answer.phase, f"step {answer.step}")))
    line = f"out of memory: {format_bytes(answer.asked_bytes)} asked for at {where} ({doing})"
    if answer.device_free_bytes is not None:
        line += f", {format_bytes(answer.device_free_bytes)} free on the device"
    yield Text(clean(line), style="bold red")
    for frame in answer.stack[1:_FRAMES]:
        yield Text(f"             {clean(frame)}", style="dim")
    yield from _held(answer)
    yield from _fragmentation(answer)
    yield Text()
    yield Text("what would have helped", style="bold")
    for remedy in answer.remedies:
        yield from _remedy(remedy)
    for text in answer.notes:
        yield Text(f"note: {clean(text)}")
    if answer.failures > 1:
        yield Text(f"note: {answer.failures} requests failed in the history; this is the last")
    if next_command:
        yield Text()
        yield Text.assemble(("next: ", "bold"), clean(next_command))


def _held(answer: OomExplanation) -> Iterator[Text]:
    yield Text()
    yield Text(
        f"in use then  {format_bytes(answer.allocated_bytes)} of "
        f"{format_bytes(answer.reserved_bytes)} reserved",
        style="bold",
    )
    for phase, nbytes in answer.by_phase.items():
        yield Text(f"  {format_bytes(nbytes):>10}  {_PHASES.get(phase, phase or 'unknown')}")
    if answer.waiting_bytes:
        waiting = format_bytes(answer.waiting_bytes)
        yield Text(f"  {waiting:>10}  of it released, but awaiting another stream")
    yield Text("by source line")
    for one in answer.consumers:
        source = shorten(clean(one.source or "not recorded"), 44)
        what = ", ".join(filter(None, (short_op(one.op), one.phase)))
        count = f"{one.blocks} x" if one.blocks > 1 else ""
        yield Text(f"  {format_bytes(one.bytes):>10} {count:>7}  {source:<44}  {clean(what)}")


def _fragmentation(answer: OomExplanation) -> Iterator[Text]:
    yield Text()
    text = f"fragmentation  {format_bytes(answer.unallocated_bytes)} reserved but in no block"
    if answer.unallocated_bytes:
        text += f"; largest piece for this request {format_bytes(answer.largest_free_bytes)}"
    yield Text(text, style="bold")
    if answer.missing_bytes == 0:
        yield Text("  without it the request would have been served")
    elif answer.missing_bytes is not None:
        missing = format_bytes(answer.missing_bytes)
        yield Text(f"  without any of it {missing} would still be missing")
    if answer.gpu is not None and answer.outside_bytes is not None:
        yield Text(
            f"outside        {format_bytes(answer.outside_bytes)} of the card in neither; "
            f"a context takes up to {format_bytes(answer.gpu.context_high_bytes)}"
        )
        if answer.other_processes_bytes:
            others = format_bytes(answer.other_processes_bytes)
            yield Text(f"  at least {others} are other processes' or libraries'")


def _remedy(remedy: Remedy) -> Iterator[Text]:
    if remedy.fits:
        verdict = "yes" + (
            f", {format_bytes(remedy.spare_bytes)} spare" if remedy.spare_bytes else ""
        )
    else:
        verdict = f"no, {format_bytes(-remedy.spare_bytes)} missing"
    yield Text(f"  {remedy.change:<50}{verdict} ({remedy.how})")
    if remedy.detail:
        yield Text(f"    {remedy.detail}", style="dim")
