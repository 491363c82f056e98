"""An `Estimate` for a person at a terminal; the first line is the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from memplan.report.plot import memory_plot, room_is_near
from memplan.report.text import (
    clean,
    format_bytes,
    headline,
    interval_text,
    short_op,
    shorten,
)
from memplan.types.estimate import Estimate, TensorInfo

_MAX_WIDTH = 110
_BAR = 24
_KERNELS = 6


def print_estimate(estimate: Estimate, console: Console, *, next_command: str = "") -> None:
    """Write the report. Colour, width and character set follow the console; `next_command` is what
    the reader will most likely want to type next."""
    ascii_only = not console.encoding.lower().replace("-", "").startswith("utf")
    width = min(console.width, _MAX_WIDTH)
    for line in estimate_lines(estimate, width, ascii_only, next_command):
        console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)


def estimate_lines(
    estimate: Estimate, width: int, ascii_only: bool, next_command: str = ""
) -> Iterator[Text]:
    """The report's lines."""
    yield _headline(estimate, ascii_only)
    yield from _ranks(estimate, ascii_only)
    yield Text()
    yield from _breakdown(estimate, ascii_only)
    yield Text()
    yield from _peak(estimate, width, ascii_only)
    yield from _host(estimate, ascii_only)
    yield from _largest(estimate, width, ascii_only)
    yield from _curve(estimate, width, ascii_only)
    yield from _basis(estimate, ascii_only)
    if next_command:
        yield Text()
        yield Text.assemble(("next: ", "bold"), clean(next_command, ascii_only=ascii_only))


def _headline(estimate: Estimate, ascii_only: bool) -> Text:
    line = headline(estimate)
    if ascii_only:
        line = line.replace("–", "-")
    style = {True: "bold green", False: "bold red", None: "bold"}[estimate.fits]
    return Text(line, style=style)


def _ranks(estimate: Estimate, ascii_only: bool) -> Iterator[Text]:
    """Which rank the answer is about, and the others beside it."""
    if estimate.world_size is None:
        return
    largest = ", the largest of those captured" if len(estimate.ranks) > 1 else ""
    yield Text(f"rank {estimate.rank} of {estimate.world_size}{largest}", style="bold")
    for item in estimate.ranks:
        peak = interval_text(item.low_bytes, item.peak_bytes, item.high_bytes)
        if ascii_only:
            peak = peak.replace("–", "-")
        verdict = {True: "fits", False: "does not fit", None: ""}[item.fits]
        same = f"as rank {item.same_as}" if item.same_as is not None else ""
        said = ", ".join(filter(None, (verdict, same, item.why)))
        yield Text(f"  {item.rank:>6}  peak {peak}  {said}", style="dim")


def _breakdown(estimate: Estimate, ascii_only: bool) -> Iterator[Text]:
    items = sorted(estimate.breakdown.items(), key=lambda item: -item[1])
    block = "#" if ascii_only else "█"
    for name, nbytes in items:
        share = nbytes / max(estimate.peak_bytes, 1)
        if nbytes:
            yield Text.assemble(
                f"  {name.replace('_', ' '):<16}{format_bytes(nbytes):>10}{share:>6.0%}  ",
                (block * round(share * _BAR), "cyan"),
            )


def _peak(estimate: Estimate, width: int, ascii_only: bool) -> Iterator[Text]:
    peak = estimate.peak
    if peak.event < 0:
        yield Text("at the peak  nothing has happened yet", style="dim")
        return
    where = [short_op(peak.op) or "an unnamed operation"]
    if peak.module:
        where.append(f"in {peak.module}")
    yield Text.assemble(
        ("at the peak  ", "bold"),
        clean(f"{' '.join(where)}, {peak.phase}, step {peak.step}", ascii_only=ascii_only),
    )
    if peak.source:
        source = shorten(clean(peak.source, ascii_only=ascii_only), width - 13)
        yield Text(" " * 13 + source, style="dim")
    yield Text(
        f"PyTorch      reserved {format_bytes(estimate.reserved_peak_bytes)}, "
        f"allocated {format_bytes(estimate.allocated_peak_bytes)}",
        style="dim",
    )


def _host(estimate: Estimate, ascii_only: bool) -> Iterator[Text]:
    low, peak, high = (
        estimate.host_low_bytes,
        estimate.host_peak_bytes,
        estimate.host_high_bytes,
    )
    if low is None or peak is None or high is None:
        return
    line = f"host RAM     {interval_text(low, peak, high)}"
    if estimate.host_pinned_peak_bytes:
        line += f", of it pinned {format_bytes(estimate.host_pinned_peak_bytes)}"
    if estimate.host_processes > 1 and estimate.host_node_peak_bytes is not None:
        node = format_bytes(estimate.host_node_peak_bytes)
        line += f"; {estimate.host_processes} processes on a node: {node}"
    yield Text(line.replace("–", "-") if ascii_only else line, style="dim")


def _largest(estimate: Estimate, width: int, ascii_only: bool) -> Iterator[Text]:
    if not estimate.largest:
        return
    yield Text()
    yield Text("largest tensors at the peak", style="bold")
    rows = Counter(_tensor_row(tensor, ascii_only) for tensor in estimate.largest)
    what = min(max(len(description) for _, description, _, _ in rows), 34)
    for (size, description, origin, source), count in rows.items():
        size = f"{count} x {size}" if count > 1 else size
        room = max(width - 13 - 2 - what - 2, 12)
        origin = shorten(origin, max(room - len(source) - 2, 12))
        yield Text(f"{size:>13}  {shorten(description, what):<{what}}  {origin}  {source}".rstrip())


def _tensor_row(tensor: TensorInfo, ascii_only: bool) -> tuple[str, str, str, str]:
    """Size, shape and dtype, origin, source line: tensors that read alike share a line."""
    description = " ".join(filter(None, (tensor.shape, tensor.dtype)))
    maker = tensor.name or " in ".join(filter(None, (short_op(tensor.op), tensor.module)))
    role = tensor.role.replace("_", " ")
    return (
        format_bytes(tensor.bytes),
        clean(description, ascii_only=ascii_only),
        clean(f"{maker}, {role}" if maker else role, ascii_only=ascii_only),
        clean(tensor.source.rpartition("/")[2], ascii_only=ascii_only),
    )


def _curve(estimate: Estimate, width: int, ascii_only: bool) -> Iterator[Text]:
    room = None
    if estimate.gpu is not None:
        room = estimate.gpu.total_bytes - estimate.gpu.context_bytes
    lines = memory_plot(
        estimate.curve,
        width=width,
        room_bytes=room,
        peak_event=estimate.peak.event,
        ascii_only=ascii_only,
    )
    if lines:
        yield Text()
        legend = "  allocated (area), reserved (line)"
        if room and room_is_near(estimate.curve, room):
            legend += ", room for PyTorch on the card (broken line)"
        yield Text.assemble(("memory over time", "bold"), legend)
        for line in lines:
            yield Text(line, style="cyan")


def _basis(estimate: Estimate, ascii_only: bool) -> Iterator[Text]:
    """What the answer rests on: assumptions, kernels, notes, the capture's end."""
    yield Text()
    if estimate.assumptions:
        yield Text("assumed", style="bold")
        for item in estimate.assumptions:
            times = f" ({item.count} times)" if item.count > 1 else ""
            where = f" [{item.source}]" if item.source else ""
            yield Text("  " + clean(f"{item.text}{times}{where}", ascii_only=ascii_only))
    kernels: Counter[str] = Counter()
    for choice in estimate.kernels:
        kernels[choice.kernel] += choice.count
    if kernels:
        shown = [f"{kernel} ({count})" for kernel, count in kernels.most_common(_KERNELS)]
        more = len(kernels) - len(shown)
        tail = f", and {more} more in --json" if more > 0 else ""
        yield Text.assemble(
            ("kernels  ", "bold"), clean(", ".join(shown) + tail, ascii_only=ascii_only)
        )
    reason = estimate.stop_reason or f"{estimate.steps} optimizer steps"
    captured = f"{estimate.events} events; {reason}"
    yield Text.assemble(("captured ", "bold"), clean(captured, ascii_only=ascii_only))
    for note in estimate.notes:
        yield Text.assemble(("note     ", "bold"), clean(note, ascii_only=ascii_only))
