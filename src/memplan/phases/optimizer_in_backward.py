"""The optimizer in backward, on a trace: whether a job allows it, and what it would then ask for.

An update then comes in the backward pass, as soon as its gradient is complete, and the gradient is
released (`runtime/optimizer_in_backward`): gradients are not alive together, and neither are the
temporaries of a step over all parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memplan.phases.pass_values import touched
from memplan.phases.steps import find_steps
from memplan.timing.workload import storage_bytes
from memplan.types.step_graph import Bools
from memplan.types.trace import I64, EventKind, Phase, Role, Trace

_CLIPS = (
    "aten.clamp_.default",
    "aten._foreach_clamp_min_.Scalar",
    "aten._foreach_clamp_max_.Scalar",
)
"""What `torch.nn.utils.clip_grad_value_` calls."""


@dataclass(frozen=True)
class UpdatesInBackward:
    """What a trace says of them. Bytes are requested ones."""

    reason: str
    """Why they would change a number; empty where nothing in the trace forbids them."""
    parameters: int = 0
    """Number of parameters that get a gradient in a step."""
    gradient_bytes: int = 0
    clips: bool = False
    """Whether gradients are clipped by value, which can be done to each before its update."""


def updates_in_backward(trace: Trace) -> UpdatesInBackward:
    """Judge by the steady step, else by the last complete one.

    A trace does not show everything that matters (which optimizer, whose hooks): the run itself
    watches its first step.
    """
    table = find_steps(trace)
    if not len(table) or not len(trace.ops):
        return UpdatesInBackward("the trace has no optimizer steps with operators")
    if has_buckets(trace):
        return UpdatesInBackward("DistributedDataParallel sums gradients over ranks in buckets")
    if is_compiled(trace):
        return UpdatesInBackward("torch.compile returns gradients all at once")
    step = table.steady if table.steady is not None else len(table) - 1
    return _Step(trace, step, *table[step]).judged()


def has_buckets(trace: Trace) -> bool:
    """Whether a module of the job is one of DistributedDataParallel."""
    return any(name.startswith("DistributedDataParallel") for name in trace.strings)


def is_compiled(trace: Trace) -> bool:
    """Whether kernels of PyTorch Inductor run in the job."""
    return any(name.startswith("inductor.") for name in trace.strings)


class _Step:
    """One step of a trace, its operators and their uses of storages."""

    def __init__(self, trace: Trace, step: int, start: int, stop: int) -> None:
        self._trace = trace
        numbers = np.maximum.accumulate(trace.ops.step)
        first, last = np.searchsorted(numbers, [step, step + 1]).tolist()
        self._first, self._rows = first, (first, last)
        self._phase = trace.ops.phase[first:last]
        self._row, self._storage = _uses(trace, first, last)
        names = trace.ops.name[first:last]
        clips = [number for number, text in enumerate(trace.strings) if text in _CLIPS]
        others = (Phase.FORWARD, Phase.OPTIMIZER)  # Rprop clips the sizes of its steps
        self._clipped = np.isin(names, clips) & ~np.isin(self._phase, others)
        self._events = slice(start, stop)
        is_gradient = trace.storages.role == Role.GRADIENT
        kind, storage = trace.events.kind[start:stop], trace.events.storage[start:stop]
        made = storage[(kind == EventKind.ALLOC) & (storage >= 0)]
        self._made = made[is_gradient[made]]
        self._is_gradient = is_gradient
        backward = self._phase == Phase.BACKWARD
        working = backward | (self._phase == Phase.FORWARD) | (self._phase == Phase.OPTIMIZER)
        begins = np.diff(backward[working].astype(np.int8), prepend=np.int8(0)) == 1
        self._passes = np.zeros(len(self._phase), np.int64)
        """The number of each operator's backward pass; 0 for operators outside of one."""
        self._passes[working] = np.cumsum(begins) * backward[working]

    def judged(self) -> UpdatesInBackward:
        checks = (
            self._steps_apart,
            self._keeps,
            self._makes_none,
            self._used_elsewhere,
            self._accumulates,
            self._weights_used,
            self._in_other_steps,
        )
        reason = next(filter(None, (check() for check in checks)), "")
        total = int(storage_bytes(self._trace)[self._made].sum())
        clips = self._clipped[self._row] & np.isin(self._storage, self._made)
        return UpdatesInBackward(reason, len(self._made), total, bool(clips.any()))

    def _keeps(self) -> str:
        kept = self._is_gradient[self._storage] & ~np.isin(self._storage, self._made)
        if (kept & (self._phase == Phase.BACKWARD)[self._row]).any():
            return "gradients are kept from step to step"
        return ""

    def _makes_none(self) -> str:
        if not (self._phase == Phase.OPTIMIZER).any():
            return "no optimizer of PyTorch's updates them"
        return "" if len(self._made) else "no gradients are made in a step"

    def _steps_apart(self) -> str:
        """Several optimizers, each after a backward pass of its own; or one with a closure."""
        passes = np.flatnonzero(np.isin(self._passes, self._passes_with_gradients()))
        stepped = np.flatnonzero(self._phase == Phase.OPTIMIZER)
        if len(passes) and len(stepped) and stepped[0] < passes[-1]:
            return "an optimizer's step begins before the last backward pass"
        return ""

    def _in_other_steps(self) -> str:
        """Of weights that are other storages in each step it may seem so: the last check."""
        other = len(_updated(self._trace, *self._rows)) < len(_updated(self._trace))
        return "some weights are updated in other steps only" if other else ""

    def _accumulates(self) -> str:
        passes = self._passes_with_gradients()
        several = len(passes) > 1
        return f"gradients are accumulated over {len(passes)} backward passes" if several else ""

    def _passes_with_gradients(self) -> I64:
        """Others are a script's own, of `torch.autograd.grad` or `torch.func`."""
        passes = np.unique(self._passes[self._row[self._is_gradient[self._storage]]])
        return passes[passes > 0]

    def _used_elsewhere(self) -> str:
        allowed = np.isin(self._phase, (Phase.BACKWARD, Phase.OPTIMIZER))
        wrong = np.isin(self._storage, self._made) & ~(allowed | self._clipped)[self._row]
        return f"{self._named(wrong)} uses gradients" if wrong.any() else ""

    def _weights_used(self) -> str:
        """Between the backward pass and the optimizer's step."""
        backward = np.flatnonzero(np.isin(self._passes, self._passes_with_gradients()))
        optimizer = np.flatnonzero(self._phase == Phase.OPTIMIZER)
        if not len(backward) or not len(optimizer):
            return "a step has no backward pass"
        between = (self._row > backward[-1]) & (self._row < optimizer[0])
        wrong = between & (self._trace.storages.role[self._storage] == Role.PARAMETER)
        return f"{self._named(wrong)} uses weights before the optimizer" if wrong.any() else ""

    def _named(self, uses: Bools) -> str:
        """`aten.mul_.Tensor (train.py:12)`: the first of some uses."""
        trace, row = self._trace, self._first + int(self._row[uses].min())
        name = trace.strings[int(trace.ops.name[row])]
        source = trace.strings[int(trace.ops.source[row])]
        return f"{name} ({source})" if source else name


def peak_of_update(trace: Trace) -> tuple[int, int]:
    """The most requested bytes that are alive while an optimizer steps, in the steady step, else
    the last complete one, and as many without the temporaries of that step. Zeros without one."""
    table = find_steps(trace)
    if not len(table):
        return 0, 0
    start, stop = table[table.steady if table.steady is not None else len(table) - 1]
    events = trace.events
    change = np.where(events.kind == EventKind.ALLOC, events.bytes, 0)
    change -= np.where(events.kind == EventKind.FREE, events.bytes, 0)
    stepping = events.phase[start:stop] == Phase.OPTIMIZER
    whole = np.cumsum(change)[start:stop][stepping].max(initial=0)
    change[start:stop][_temporaries(trace, start, stop)] = 0
    return int(whole), int(np.cumsum(change)[start:stop][stepping].max(initial=0))


def with_updates_in_backward(trace: Trace) -> Trace:
    """The trace of the same job with updates in backward, without their own temporaries.

    A gradient is gone as soon as it is complete; what the optimizer asks for and gives back in one
    step falls away.
    """
    table = find_steps(trace)
    events = trace.events
    dropped = np.zeros(len(events), bool)
    at = np.full(len(trace.storages), len(events), np.int64)
    """For each storage, the event before which it is released at the latest."""
    starts = [*table.start.tolist(), *table.stop[-1:].tolist()]
    stops = [*table.stop.tolist(), len(events)]  # and what follows the last complete one
    numbers = np.maximum.accumulate(trace.ops.step)
    for step, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        first, last = np.searchsorted(numbers, [step, step + 1]).tolist()
        dropped[start:stop] |= _temporaries(trace, start, stop)
        gone = _released_at(trace, first, last, start, stop)
        at[gone.storage] = gone.event
    return _released_by(trace, at, dropped)


def _released_by(trace: Trace, at: I64, dropped: Bools) -> Trace:
    """Storages released before events `at` where that is earlier, without `dropped` events."""
    events = trace.events
    early = (events.storage >= 0) & (at[events.storage] < len(events))
    released = np.flatnonzero(early & (events.kind == EventKind.FREE))
    made = np.flatnonzero(early & (events.kind == EventKind.ALLOC))
    never = made[~np.isin(events.storage[made], events.storage[released])]
    row = np.append(np.arange(len(events)), never)
    kind = np.append(events.kind, np.full(len(never), EventKind.FREE, np.uint8))
    key = row.astype(np.float64)
    moved = np.append(released, np.arange(len(events), len(row)))
    before = at[events.storage[row[moved]]]
    earlier = (before <= row[moved]) | (moved >= len(events))
    moved, before = moved[earlier], before[earlier]
    key[moved] = before - 0.5
    where = row.copy()
    where[moved] = np.maximum(before - 1, 0)  # it is part of what happens there
    order = np.argsort(key, kind="stable")
    order = order[~dropped[row[order]]]
    columns = {name: column[row[order]] for name, column in vars(events).items()}
    columns["kind"] = kind[order].astype(np.uint8)
    for name in ("op", "module", "phase", "step", "source"):
        columns[name] = getattr(events, name)[where[order]]
    key = key[order]
    return replace(
        trace,
        events=replace(events, **columns),
        ops=replace(trace.ops, event=np.searchsorted(key, trace.ops.event).astype(np.int64)),
        host=replace(trace.host, event=np.searchsorted(key, trace.host.event).astype(np.int64)),
    )


def _updated(trace: Trace, first: int = 0, last: int | None = None) -> I64:
    """Parameters that the optimizer writes in operators `[first, last)`."""
    ops = trace.ops
    writes = ops.writes[ops.writes_start[first] : ops.writes_start[-1 if last is None else last]]
    counts = np.diff(ops.writes_start[first : None if last is None else last + 1])
    stepping = np.repeat(ops.phase[first:last] == Phase.OPTIMIZER, counts)
    return np.unique(writes[stepping & (trace.storages.role[writes] == Role.PARAMETER)])


@dataclass(frozen=True)
class _Released:
    """Gradients, ascending, each with the event before which it is released."""

    storage: I64
    event: I64


def _released_at(trace: Trace, first: int, last: int, start: int, stop: int) -> _Released:
    """The gradients made in events `[start, stop)`: when they are complete."""
    kind, storage = trace.events.kind[start:stop], trace.events.storage[start:stop]
    made = storage[(kind == EventKind.ALLOC) & (storage >= 0)]
    made = np.unique(made[trace.storages.role[made] == Role.GRADIENT])
    row, used = _uses(trace, first, last)
    phase = trace.ops.phase[first:last]
    begins = np.append(trace.ops.event[first:last], stop)
    known = np.isin(used, made) & (phase[row] == Phase.BACKWARD)
    ready = np.full(len(made), last - first - 1, np.int64)
    found = np.full(len(made), -1, np.int64)
    np.maximum.at(found, np.searchsorted(made, used[known]), row[known])
    ready = np.where(found >= 0, found, ready)
    return _Released(made, begins[ready + 1].astype(np.int64))


def _temporaries(trace: Trace, start: int, stop: int) -> Bools:
    """Which events in `[start, stop)` belong to temporaries of an optimizer's step."""
    events = trace.events
    kind, storage = events.kind[start:stop], events.storage[start:stop]
    within = (events.phase[start:stop] == Phase.OPTIMIZER) & (storage >= 0)
    made = storage[within & (kind == EventKind.ALLOC)]
    gone = storage[within & (kind == EventKind.FREE)]
    return np.asarray(within & np.isin(storage, np.intersect1d(made, gone)), bool)


def _uses(trace: Trace, first: int, last: int) -> tuple[I64, I64]:
    """Rows, from 0, and storages that operators `[first, last)` read or write."""
    ops = trace.ops
    read_rows, read = touched(ops.reads_start, ops.reads, first, last)
    write_rows, written = touched(ops.writes_start, ops.writes, first, last)
    return np.append(read_rows, write_rows), np.append(read, written)
