"""An `Estimate` for a person at a terminal; the first line is the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.text import Text

from memplan.report.plot import memory_plot, room_is_near
from memplan.report.tensors import largest_lines
from memplan.report.text import (
    clean,
    format_bytes,
    headline,
    interval_text,
    misfit,
    short_op,
    shorten,
    step_line,
    step_text,
)
from memplan.types.estimate import Estimate, RankEstimate

_MAX_WIDTH = 110
_BAR = 24
_KERNELS = 6
_OPERATORS = {"scaled_dot_product_attention": "attention", "recurrent": "RNN"}
_GATHERED = "gathered parameters"
_MEANINGS = {
    "parameters": "and buffers",
    "activations": "kept for the backward pass",
    "temporaries": "results in use for a moment",
    _GATHERED: "FSDP all-gather",
    "inputs": "batches",
    "workspaces": "scratch of kernels and libraries",
    "fragmentation": "reserved, used by nobody",
    "engine": "weights, KV cache and graphs for inference",
    "communication": "buffers of collectives, NCCL",
    "context": "CUDA itself, outside PyTorch",
}


def estimate_lines(estimate: Estimate, width: int, next_command: str = "") -> Iterator[Text]:
    """The report's lines, at most 110 characters wide; `next_command` is what the reader will most
    likely want to type next."""
    width = min(width, _MAX_WIDTH)
    style = {True: "bold green", False: "bold red", None: "bold"}[estimate.fits]
    yield Text(headline(estimate), style=style)
    if step := step_line(estimate):
        yield Text(step)
    yield from _ranks(estimate)
    yield Text()
    yield from _breakdown(estimate, width)
    yield Text()
    yield from _peak(estimate, width)
    yield from _phases(estimate)
    yield from _stages(estimate)
    for host in _host_lines(estimate):
        yield Text(host, style="dim")
    yield from _largest(estimate, width)
    yield from _curve(estimate, width)
    yield from _basis(estimate)
    if next_command:
        yield Text()
        yield Text.assemble(("next: ", "bold"), clean(next_command))


def _phases(estimate: Estimate) -> Iterator[Text]:
    """What is allocated in each phase, where the job does more than train."""
    if not any(one.phase == "evaluation" for one in estimate.phases):
        return
    said = (f"{one.phase} {format_bytes(one.allocated_peak_bytes)}" for one in estimate.phases)
    yield Text.assemble(("allocated at most  ", "bold"), ", ".join(said))


def _stages(estimate: Estimate) -> Iterator[Text]:
    """What the card holds in turn, and the engines that share it with the training."""
    for row, one in enumerate(estimate.stages):
        peak, used = format_bytes(one.peak_bytes), format_bytes(one.in_use_bytes)
        title = "on the card" if not row else ""
        yield Text.assemble((f"{title:<13}", "bold"), f"{one.stage:<14}{peak:>9}, in use {used}")
    for engine in estimate.engines:
        parts = f"weights {format_bytes(engine.weight_bytes)}"
        parts += f", KV cache {format_bytes(engine.kv_cache_bytes)}"
        if engine.separate:
            parts += ", in a process of its own"
        yield Text.assemble(
            (f"{engine.name:<13}", "bold"), f"{engine.share:g} of the card: {parts}"
        )
        if engine.why:
            yield Text(f"{'':<13}no gpu_memory_utilization fits: {engine.why}")
        elif engine.largest_share is not None:
            yield Text(f"{'':<13}gpu_memory_utilization up to {engine.largest_share:.2f} fits")


def _ranks(estimate: Estimate) -> Iterator[Text]:
    """Which rank the answer is about, and the others beside it."""
    if estimate.world_size is None:
        return
    others = [item for item in estimate.ranks if item.rank != estimate.rank]
    beside = ""
    if others and all(item.same_as == estimate.rank for item in others):
        beside = "; the others captured need the same"
    elif others:
        beside = ", which needs most of those captured"
    yield Text(f"rank {estimate.rank} of {estimate.world_size}{beside}", style="bold")
    rows = [_rank_row(item, estimate) for item in estimate.ranks]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for rank, peak, host, said in rows:
        line = f"  {rank:>{widths[0]}}  {peak:<{widths[1]}}  {host:<{widths[2]}}  {said}"
        yield Text(line, style="dim")


def _rank_row(item: RankEstimate, estimate: Estimate) -> tuple[str, str, str, str]:
    peak = interval_text(item.low_bytes, item.peak_bytes, item.high_bytes)
    host = "" if item.host_peak_bytes is None else f"host RAM {format_bytes(item.host_peak_bytes)}"
    verdict = "fits" if item.fits else ""
    if item.fits is False and estimate.gpu is not None:
        verdict = misfit(item.peak_bytes * estimate.card_processes, estimate.gpu.total_bytes)
    same = f"the same as rank {item.same_as}" if item.same_as is not None else ""
    said = ", ".join(filter(None, (verdict, same, item.why)))
    return f"rank {item.rank}", f"peak {peak}", host, said


def _breakdown(estimate: Estimate, width: int) -> Iterator[Text]:
    parts = {name.replace("_", " "): nbytes for name, nbytes in estimate.breakdown.items()}
    parts["temporaries"] -= estimate.gathered_parameter_bytes
    parts[_GATHERED] = estimate.gathered_parameter_bytes
    shown = sorted(filter(lambda part: part[1], parts.items()), key=lambda part: -part[1])
    if not shown:
        return
    total = max(estimate.peak_bytes, 1)
    name_width = max(16, *(len(name) + 1 for name, _ in shown))
    bar_width = round(shown[0][1] / total * _BAR)
    for name, nbytes in shown:
        bar = "█" * round(nbytes / total * _BAR)
        figures = f"  {name:<{name_width}}{format_bytes(nbytes):>10}{nbytes / total:>6.0%}  "
        meaning = _MEANINGS.get(name, "")
        if len(figures) + bar_width + 2 + len(meaning) > width:
            meaning = ""
        padded = f"{bar:<{bar_width}}  " if meaning else bar
        yield Text.assemble(figures, (padded, "cyan"), (meaning, "dim"))


def _peak(estimate: Estimate, width: int) -> Iterator[Text]:
    peak = estimate.peak
    if peak.event < 0:
        yield Text("at the peak  nothing has happened yet", style="dim")
        return
    where = [short_op(peak.op) or "an unnamed operation"]
    if peak.module:
        where.append(f"in {peak.module}")
    when = step_text(peak.step, peak.phase, estimate.steps)
    text = clean(f"{' '.join(where)}, {peak.phase}, {when}")
    yield Text.assemble(("at the peak  ", "bold"), text)
    if peak.source:
        source = shorten(clean(peak.source), width - 13)
        yield Text(" " * 13 + source, style="dim")
    yield Text(
        f"PyTorch      at most {format_bytes(estimate.reserved_peak_bytes)} reserved, at "
        f"most {format_bytes(estimate.allocated_peak_bytes)} allocated to tensors",
        style="dim",
    )


def _host_lines(estimate: Estimate) -> Iterator[str]:
    low, peak, high = estimate.host_low_bytes, estimate.host_peak_bytes, estimate.host_high_bytes
    if low is None or peak is None or high is None:
        return
    pinned = estimate.host_pinned_peak_bytes
    of_it = f", of it pinned {format_bytes(pinned)}" if pinned else ""
    whose = "of this process" if estimate.host_processes > 1 else ""
    yield f"host RAM     {interval_text(low, peak, high)} {whose}".rstrip() + of_it
    node = (
        estimate.host_node_low_bytes,
        estimate.host_node_peak_bytes,
        estimate.host_node_high_bytes,
    )
    if estimate.host_processes > 1 and None not in node:
        together = interval_text(*(nbytes or 0 for nbytes in node))
        yield f"             {together} of the {estimate.host_processes} ranks of a node together"


def _largest(estimate: Estimate, width: int) -> Iterator[Text]:
    if estimate.largest:
        yield Text()
        yield Text("largest tensors at the peak", style="bold")
        yield from largest_lines(estimate.largest, width)


def _curve(estimate: Estimate, width: int) -> Iterator[Text]:
    room = None
    if estimate.gpu is not None:
        room = estimate.gpu.total_bytes - estimate.gpu.context_bytes
    lines = memory_plot(
        estimate.curve,
        width=width,
        room_bytes=room,
        peak_event=estimate.peak.event,
        steps=estimate.steps + estimate.repeated_steps,
    )
    if lines:
        yield Text()
        legend = "  allocated (area), reserved (line)"
        if room and room_is_near(estimate.curve, room):
            legend += ", room for PyTorch on the card (broken line)"
        yield Text.assemble(("memory over time", "bold"), legend)
        for line in lines:
            yield Text(line, style="cyan")


def _basis(estimate: Estimate) -> Iterator[Text]:
    """What the answer rests on: assumptions, kernels, notes, the capture's end."""
    yield Text()
    if estimate.assumptions:
        yield Text("assumed", style="bold")
        for item in estimate.assumptions:
            times = f" ({item.count} times)" if item.count > 1 else ""
            where = f" [{item.source}]" if item.source else ""
            yield Text("  " + clean(f"{item.text}{times}{where}"))
    kernels: Counter[str] = Counter()
    for choice in estimate.kernels:
        op = short_op(choice.op)
        kernels[f"{_OPERATORS.get(op, op)}: {choice.kernel}"] += choice.count
    if kernels:
        shown = [f"{kernel} ({count})" for kernel, count in kernels.most_common(_KERNELS)]
        more = len(kernels) - len(shown)
        tail = f", and {more} more in --json" if more > 0 else ""
        yield Text.assemble(("kernels  ", "bold"), clean(", ".join(shown) + tail))
    reason = estimate.stop_reason or f"{estimate.steps} optimizer steps"
    captured = f"{estimate.events} events; {reason}"
    yield Text.assemble(("captured ", "bold"), clean(captured))
    for note in estimate.notes:
        yield Text.assemble(("note     ", "bold"), clean(note))
