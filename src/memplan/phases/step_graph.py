"""The `StepGraph` of a trace: its steady step's dearest pass as a graph of operators and values."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property

import numpy as np

from memplan.phases.droppable import RowFacts, droppable_values, kept_between, replayable_rows
from memplan.phases.in_flight import in_flight
from memplan.phases.pass_values import PassValues, pass_values
from memplan.phases.passes import (
    AGAIN,
    Pass,
    StepPasses,
    alive_after,
    call_numbers,
    passes_of_steps,
    step_passes,
)
from memplan.phases.roots import root_names
from memplan.timing.seconds import op_seconds
from memplan.types.device import DeviceProfile, captured_for
from memplan.types.step_graph import F64, GraphOps, GraphValues, StepGraph
from memplan.types.trace import I64, Phase, Role, Trace

_MOST_KINDS = 4
"""The most kinds of pass that are planned; where there are more, steps mostly differ, too."""


def step_graph(
    trace: Trace,
    profile: DeviceProfile | None = None,
    *,
    step: int | None = None,
    seconds: F64 | None = None,
) -> StepGraph:
    """The graph of a step's pass with the highest peak, the first of several.

    By default of the steady step, else of the last complete one. `profile` prices the operators;
    None: the card that the trace was captured for, else the default one. `seconds` are measured
    ones, by operator of the trace, in place of the profile's.

    Memory that a kernel takes for itself is one value a row, the last that the row writes: what
    the row's peak holds beyond the other values that are alive during it. A node of autograd lets
    go of what it saved after its last operator: that operator is among the readers of a droppable
    value, for what is recomputed lives as long.

    Raises NoAnswerError for traces without operators (snapshots, CSV) or without a backward pass,
    UsageError for a step that is not there.
    """
    return _Step(trace, profile, step, seconds).graph()


def step_graphs(trace: Trace, profile: DeviceProfile | None, above: int) -> list[StepGraph]:
    """Graphs as by `step_graph`, one for each kind of pass whose peak is above `above` (requested
    bytes), as where both networks of a GAN are trained. The costliest comes first. A kind of pass
    that only some steps have (a generator's, every fifth step) counts as if each step had it. Where
    several passes are in flight at once, or there are more kinds than are planned, the only graph
    is that of `step_graph`."""
    return _Step(trace, profile, None, None).graphs(above)


class _Step:
    """What the graphs of a step's passes are made from."""

    def __init__(
        self, trace: Trace, profile: DeviceProfile | None, step: int | None, seconds: F64 | None
    ) -> None:
        self.found = step_passes(trace, step)
        self.beside = in_flight(trace, self.found)
        self.trace = trace = self.beside.trace if self.beside else trace
        self.alive = alive_after(trace)
        self._card = profile or captured_for(trace.meta.gpu)
        self._seconds = (
            seconds[self.beside.order] if self.beside and seconds is not None else seconds
        )

    def graph(self) -> StepGraph:
        if self.beside:
            return self._of(self.beside.chosen, [self.beside.whole], [], [self.found])
        chosen = self._dearest(self.found.passes)
        alike = self._like(chosen, self.found.passes)
        return self._of(chosen, alike, alike, [self.found])

    def graphs(self, above: int) -> list[StepGraph]:
        if self.beside:
            return [self.graph()]
        steps = [self.found, *passes_of_steps(self.trace)]
        kinds = self._kinds(steps, above)
        if len(kinds) > _MOST_KINDS:
            steps = [self.found]
            kinds = self._kinds(steps, above)
        of_step, dearest = self.found.passes, [alike[0] for alike in kinds]
        everywhere = all(any(p in of_step for p in alike) for alike in kinds)
        if len(kinds) > _MOST_KINDS or (len(kinds) < 2 and everywhere):
            return [self.graph()]
        steps = [s for s in steps if s is self.found or any(p in dearest for p in s.passes)]
        names = tuple(map(self._roots, dearest))
        planned = [p for step in steps for p in step.passes if self._roots(p) in names]
        before = np.cumsum([0, *map(len, names)]).tolist()
        return [
            replace(
                self._of(alike[0], planned, [p for p in alike if p in of_step], steps),
                kinds=names,
                calls_before=calls,
            )
            for alike, calls in zip(kinds, before, strict=False)
        ]

    def _kinds(self, steps: list[StepPasses], above: int) -> list[list[Pass]]:
        """Kinds of pass in these steps with a peak above `above`: lists of equal passes, the
        costliest kind and the costliest pass first. At most one more kind than are planned.

        Passes that only other steps have (a first one that fills a cache, say) are no kind of their
        own where a run cannot tell them from another kind: they call the same roots.
        """
        of_step = self.found.passes
        every = list(dict.fromkeys(p for step in steps for p in step.passes))
        left = [p for p in every if self._peak(p) > above]
        known = {self._roots(p) for p in left if p in of_step}
        kinds: list[list[Pass]] = []
        while left and len(kinds) <= _MOST_KINDS:
            chosen = self._dearest(left)
            alike = self._like(chosen, every)
            if self._roots(chosen) not in known or any(p in of_step for p in alike):
                kinds.append([chosen, *(p for p in alike if p != chosen)])
                known.add(self._roots(chosen))
            left = [p for p in left if p not in alike]
        return kinds

    @cached_property
    def _root_names(self) -> dict[int, str]:
        return root_names(self.trace)

    def _roots(self, one: Pass) -> tuple[str, ...]:
        """The root modules that a pass calls, in the order of `_calls`."""
        rows = slice(one.start, one.stop)
        renumbered, (call, _) = _calls(self.trace, one), call_numbers(self.trace.ops.call[rows])
        numbers, first = np.unique(renumbered, return_index=True)
        return tuple(self._root_names[int(call[row])] for row in first[numbers >= 0].tolist())

    def _peak(self, one: Pass) -> int:
        return int(self.alive[one.first_event : one.last_event + 1].max())

    def _dearest(self, passes: list[Pass]) -> Pass:
        return max(passes, key=self._peak)

    def _like(self, chosen: Pass, passes: list[Pass]) -> list[Pass]:
        return [p for p in passes if _alike(self.trace, p, chosen)]

    def _of(
        self, chosen: Pass, planned: list[Pass], alike: list[Pass], steps: list[StepPasses]
    ) -> StepGraph:
        """`planned`: the passes whose peak plans lower, of these steps. `alike`: those of a step
        that this one's does."""
        trace, beside, alive = self.trace, self.beside, self.alive
        rows = slice(chosen.start, chosen.stop)
        forward = chosen.backward - chosen.start
        values = pass_values(trace, chosen)
        base = int(alive[chosen.first_event]) - int(values.bytes[values.alloc < 0].sum())
        values = values.with_scratch(_scratch_bytes(trace, chosen, values, alive - base))
        if beside:
            values = values.there_before(forward)
        call = _calls(trace, chosen)
        _, in_function = call_numbers(trace.ops.call[rows])
        names = [trace.strings[number] for number in trace.ops.name[rows].tolist()]
        where = RowFacts(
            forward=forward,
            call=call,
            replayable=replayable_rows(names, call, values),
            without_gradients=(trace.ops.phase[rows] == Phase.EVALUATION) | in_function,
            again=trace.ops.call[rows] == AGAIN,
        )
        saved = droppable_values(values, where)
        released = (values.storage >= 0) & (values.free <= forward)
        released &= trace.storages.role[values.storage] == Role.GATHERED_PARAMETER
        between = kept_between(values, where, released)
        begins = between & (saved | (values.free <= forward))
        values = values.held_until_release(saved).unread_before(forward, released)
        where.replayable[values.writes.row[between[values.writes.value]]] = False
        droppable = saved.copy()
        droppable[values.writes.value[~where.replayable[values.writes.row]]] = False
        if self._seconds is None:
            times = op_seconds(trace, self._card, chosen.start, chosen.stop)
        else:
            times = self._seconds[rows]
        graph = StepGraph(
            ops=_operators(trace, rows, names, values, where, times),
            values=GraphValues(
                bytes=values.bytes,
                alloc=values.alloc,
                free=values.free,
                droppable=droppable,
                name=_value_names(trace, values),
            ),
            forward_ops=forward,
            base_bytes=base,
            rest_peak_bytes=max(_rest_peak(step, planned, alive) for step in steps),
            passes=beside.passes if beside else max(1, len(alike)),
            others=beside.others if beside else 0,
            between=frozenset(np.flatnonzero(begins).tolist()),
        )
        graph.check()
        return graph


def _operators(
    trace: Trace,
    rows: slice,
    names: list[str],
    values: PassValues,
    where: RowFacts,
    seconds: F64,
) -> GraphOps:
    return GraphOps(
        name=names,
        call=where.call,
        nth=_nth(names, where.call),
        module=[trace.strings[number] for number in trace.ops.module[rows].tolist()],
        seconds=seconds,
        flops=trace.ops.flops[rows],
        replayable=where.replayable,
        reads_start=values.reads.starts(len(names)),
        reads=values.reads.value,
        writes_start=values.writes.starts(len(names)),
        writes=values.writes.value,
    )


def plain_peak(graph: StepGraph) -> int:
    """The step's allocated peak in requested bytes when nothing is recomputed."""
    rows = alive_rows(len(graph), graph.values.alloc, graph.values.free, graph.values.bytes)
    return max(graph.rest_peak_bytes, graph.base_bytes + int(rows.max(initial=0)))


def alive_rows(count: int, alloc: I64, free: I64, nbytes: I64) -> I64:
    """Bytes of the values alive during each of `count` rows."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, np.maximum(alloc, 0), nbytes)
    np.subtract.at(change, free, nbytes)
    return np.asarray(np.cumsum(change)[:count], np.int64)


def _value_names(trace: Trace, values: PassValues) -> list[str]:
    number = trace.storages.name[np.maximum(values.storage, 0)]
    return [trace.strings[n] for n in np.where(values.storage < 0, 0, number).tolist()]


def _scratch_bytes(trace: Trace, chosen: Pass, values: PassValues, alive: I64) -> I64:
    """For each row with scratch memory, the bytes of its peak beyond the values alive during it.
    `alive`: bytes before each event, without values that exist before and after the pass."""
    count = chosen.stop - chosen.start
    known = alive_rows(count, values.alloc, values.free, values.bytes)
    begins = np.append(trace.ops.event[chosen.start : chosen.stop], chosen.last_event)
    rows = values.scratch_rows
    peaks = [int(alive[begins[row] : begins[row + 1] + 1].max()) for row in rows.tolist()]
    excess: I64 = np.maximum(np.array(peaks, np.int64) - known[rows], 0)
    return excess


# Passes


def _alike(trace: Trace, one: Pass, chosen: Pass) -> bool:
    """Whether the calls of a pass run the same operators as the chosen one's, so that a plan made
    from that serves both. Views, of which memplan makes some to check what is recomputed first, and
    kinds of operators that only the other one runs (it gathers weights first, say) move none of the
    numbers by which a plan names operators."""
    calls, chosen_calls = _calls(trace, one), _calls(trace, chosen)
    names, chosen_names = (trace.ops.name[p.start : p.stop] for p in (one, chosen))
    works, chosen_works = (trace.ops.moved_bytes[p.start : p.stop] != 0 for p in (one, chosen))
    inside = (chosen_calls >= 0) & chosen_works
    also = (calls >= 0) & works & np.isin(names, chosen_names[inside])
    return np.array_equal(calls[also], chosen_calls[inside]) and np.array_equal(
        names[also], chosen_names[inside]
    )


def _rest_peak(found: StepPasses, planned: list[Pass], alive: I64) -> int:
    """Most bytes alive in a step outside these passes."""
    outside = np.ones(found.stop - found.start + 1, bool)
    for p in planned:
        inside = slice(
            max(0, p.first_event + 1 - found.start), max(0, p.last_event + 1 - found.start)
        )
        outside[inside] = False
    return int(alive[found.start : found.stop + 1][outside].max(initial=0))


def _calls(trace: Trace, chosen: Pass) -> I64:
    """Calls of the pass renumbered from 0: those in which something runs with gradients."""
    rows = slice(chosen.start, chosen.stop)
    call, _ = call_numbers(trace.ops.call[rows])
    call[chosen.backward - chosen.start :] = -1
    counts = np.unique(call[(trace.ops.phase[rows] == Phase.FORWARD) & (call >= 0)])
    known = np.isin(call, counts)
    return np.where(known, np.searchsorted(counts, call), -1).astype(np.int64)


def _nth(names: list[str], call: I64) -> I64:
    seen: Counter[tuple[int, str]] = Counter()
    nth = np.full(len(names), -1, np.int64)
    for row in np.flatnonzero(call >= 0).tolist():
        key = int(call[row]), names[row]
        nth[row] = seen[key]
        seen[key] += 1
    return nth
