"""A trace as JSON in the Trace Event Format, which ui.perfetto.dev opens.

Time is the index of an event of the trace, as a microsecond: a capture without a GPU knows the
order of requests, not how long kernels run. How long the time model takes them to run on a card
stands in a process of its own: one step, on a track for each stream, in real time. The format:
"Trace Event Format", Google, 2016; ui.perfetto.dev reads it in plain or compressed by gzip.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from memplan.report.replayed import replayed
from memplan.report.step_slices import exchange_text, step_slices
from memplan.report.text import short_op
from memplan.simulate import Timeline
from memplan.timing.step import PricedStep, priced_step
from memplan.types.device import captured_for
from memplan.types.output_file import write_file
from memplan.types.trace import I64, EventKind, Phase, Trace

_PROCESS, _STEP = 1, 2
_TRACKS = ("steps", "phases", "modules", "operators")
_AT_ONCE = 10_000
_DEEPEST = 32
"""Modules nested deeper are not told apart."""


def export_perfetto(
    trace: Trace, path: Path | str, *, device: int = 0, overwrite: bool = False
) -> None:
    """Write steps, phases, modules and operators as slices, allocated and reserved bytes as
    counters, and the step's kernels and collectives by stream. A name that ends in `.gz` is written
    compressed. Raises: as `export_memory_viz`."""
    path = Path(path)
    whole, timeline = replayed(trace, device=device)
    chunks = _document(whole, timeline, priced_step(trace, captured_for(trace.meta.gpu)))
    if path.suffix == ".gz":
        chunks = [gzip.compress(b"".join(chunks), compresslevel=6, mtime=0)]
    write_file(path, chunks, overwrite=overwrite)


def _document(trace: Trace, timeline: Timeline, priced: PricedStep | None) -> Iterable[bytes]:
    about = {
        "clock": "1 us is one event of the trace, or 1 us of a step's time",
        "command": " ".join(trace.meta.command),
    }
    yield b'{"otherData":' + msgspec.json.encode(about) + b',"traceEvents":[\n'
    lines = map(
        msgspec.json.encode,
        chain(_entries(trace, timeline), _streams(priced) if priced is not None else ()),
    )
    yield next(lines)
    while chunk := list(islice(lines, _AT_ONCE)):
        yield b",\n" + b",\n".join(chunk)
    yield b"\n]}\n"


def _entries(trace: Trace, timeline: Timeline) -> Iterator[dict[str, Any]]:
    job = " ".join(trace.meta.command[:1]) or "job"
    yield _name("process_name", 0, f"{job}, GPU {timeline.device}")
    for number, track in enumerate(_TRACKS):
        yield _name("thread_name", number, track)
        yield {**_name("thread_sort_index", number, ""), "args": {"sort_index": number}}
    yield from _counters(timeline)
    events = trace.events
    for start, stop, step in _runs(events.step):
        yield _slice("steps", start, stop, f"step {step}")
    for start, stop, phase in _runs(events.phase):
        yield _slice("phases", start, stop, Phase(phase).name.lower())
    yield from _modules(trace)
    yield from _operators(trace)
    if timeline.allocated_peak_event >= 0:
        yield _at("i", timeline.allocated_peak_event, "allocated peak", s="p", args={
            "bytes": timeline.allocated_peak_bytes
        })  # fmt: skip


def _streams(priced: PricedStep) -> Iterator[dict[str, Any]]:
    """The step's kernels and collectives, in microseconds."""
    trace, slices = priced.trace, step_slices(priced)
    ops, strings = trace.ops, trace.strings
    title = f"a step's time by the model, {captured_for(trace.meta.gpu).device_name}"
    yield _name("process_name", 0, title) | {"pid": _STEP}
    for stream in np.unique(slices.stream).tolist():
        yield _name("thread_name", stream, f"stream {stream}") | {"pid": _STEP}
    columns = (slices.op, slices.begin * 1e6, slices.seconds * 1e6, slices.stream, slices.exchanges)
    for op, begin, micros, stream, exchanges in zip(*(c.tolist() for c in columns), strict=True):
        name = exchange_text(priced, op) if exchanges else short_op(strings[ops.name[op]])
        words = {
            "module": strings[ops.module[op]],
            "source": strings[ops.source[op]],
            "phase": Phase(int(ops.phase[op])).name.lower(),
        }
        args = {key: word for key, word in words.items() if word}
        slice_ = _at("X", round(begin, 3), name, dur=round(micros, 3), args=args)
        yield slice_ | {"pid": _STEP, "tid": stream}


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """A value wherever it changes."""
    for name, column, before in (
        ("allocated", timeline.allocated, timeline.start_allocated_bytes),
        ("reserved", timeline.reserved, timeline.start_reserved_bytes),
    ):
        changed = np.flatnonzero(np.diff(column, prepend=before))
        if before:
            yield _at("C", -1, name, args={"bytes": before})
        for event in changed.tolist():
            yield _at("C", event, name, args={"bytes": int(column[event])})


def _modules(trace: Trace) -> Iterator[dict[str, Any]]:
    """Slices of modules, each within that of the module that holds it."""
    modules, of = np.unique(trace.events.module, return_inverse=True)
    paths = [trace.strings[module].split(".") for module in modules.tolist()]
    for depth in range(min(max(map(len, paths), default=0), _DEEPEST)):
        prefixes = [".".join(path[: depth + 1]) if len(path) > depth else "" for path in paths]
        numbers = {prefix: number for number, prefix in enumerate(dict.fromkeys(["", *prefixes]))}
        names = list(numbers)
        column = np.array([numbers[prefix] for prefix in prefixes], np.int64)[of.reshape(-1)]
        for start, stop, number in _runs(column):
            if number:
                yield _slice("modules", start, stop, names[number])


def _operators(trace: Trace) -> Iterator[dict[str, Any]]:
    strings, events = trace.strings, trace.events
    for start, stop, op in _runs(events.op):
        if op < 0:
            continue
        module, source = strings[int(events.module[start])], strings[int(events.source[start])]
        args = {"module": module, "source": source, "asked_bytes": _asked(trace, start, stop)}
        name = short_op(strings[int(trace.ops.name[op])])
        yield _slice("operators", start, stop, name, {k: v for k, v in args.items() if v})


def _asked(trace: Trace, start: int, stop: int) -> int:
    """Bytes of the requests in a range of events."""
    kinds = trace.events.kind[start:stop]
    return int(trace.events.bytes[start:stop][kinds == EventKind.ALLOC].sum())


def _runs(column: npt.NDArray[np.integer]) -> Iterator[tuple[int, int, int]]:
    """(first event, one past the last, value) over which a column stays the same."""
    if len(column):
        begin: I64 = np.concatenate(([0], np.flatnonzero(np.diff(column)) + 1))
        yield from zip(
            begin.tolist(), [*begin[1:].tolist(), len(column)], column[begin].tolist(), strict=True
        )


def _slice(
    track: str, start: int, stop: int, name: str, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    entry = _at("X", start, name, dur=stop - start, args=args or {})
    return entry | {"tid": _TRACKS.index(track)}


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": track, "name": kind, "args": {"name": name}}


def _at(kind: str, event: int, name: str, **more: Any) -> dict[str, Any]:
    return {"ph": kind, "pid": _PROCESS, "tid": 0, "ts": event, "name": name, **more}
