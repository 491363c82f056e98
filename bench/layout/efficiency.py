"""Simulated efficiency of a job's memory: the most bytes allocated over the most reserved.

Allocated bytes are requests rounded to 512, the same for every allocator. PyTorch's allocator is
replayed exactly, with and without expandable segments. Under a plan, the arena is reserved from the
start, and what the plan does not serve is replayed with expandable segments beside it: the sum of
the two peaks counts, which errs against the plan.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from bench.layout.stalloc import stalloc
from memplan.layout.problem import Layout, Problem, make_problem
from memplan.layout.rounds import Round, make_round, offsets_of, round_problem
from memplan.layout.serve import serve, timeline_under
from memplan.layout.solve import fit_capacity, minimise
from memplan.layout.spaces import Windows, dynamic_windows
from memplan.layout.static_plan import CLOSE, allocation_part
from memplan.layout.step import step_requests
from memplan.phases.steps import find_steps
from memplan.simulate import AllocatorSettings, simulate
from memplan.types.allocation import ROUNDING, rounded
from memplan.types.deadline import Deadline
from memplan.types.solution import Infeasible, Solved
from memplan.types.trace import I64, EventKind, Phase, Trace

EXPANDABLE = AllocatorSettings(expandable_segments=True)


@dataclass(frozen=True)
class Outcome:
    """What one way of placing makes of a job."""

    efficiency: float
    reserved_bytes: int
    arena_bytes: int = 0
    load_bytes: int = 0
    """The most bytes of planned requests alive at once: no arena is smaller."""
    planned: int = 0
    """Requests with an address."""
    missed: int = 0
    """Requests that the plan did not serve."""
    seconds: float = 0.0
    """Of planning."""


def allocated_peak(trace: Trace) -> int:
    """The most bytes in use, requests rounded."""
    events = trace.events
    size = np.zeros(len(trace.storages), np.int64)
    made = events.kind == EventKind.ALLOC
    size[events.storage[made]] = rounded(events.bytes[made])
    sign = made.astype(np.int64) - (events.kind == EventKind.FREE)
    return int(np.cumsum(np.where(events.storage >= 0, sign * size[events.storage], 0)).max())


def online(trace: Trace, settings: AllocatorSettings) -> Outcome:
    """PyTorch's caching allocator."""
    reserved = simulate(trace, settings).reserved_peak_bytes
    return Outcome(allocated_peak(trace) / reserved, reserved)


def seconds_to_match(captured: Trace, arena_bytes: int, seconds: float) -> float:
    """How long we take to a plan of `captured` in no more than an arena; infinite: not in time."""
    start = time.perf_counter()
    made = make_round(step_requests(captured))
    problem, _ = round_problem(made, dynamic_windows(made).blocks)
    answer = fit_capacity(problem, arena_bytes, deadline=Deadline(seconds))
    return time.perf_counter() - start if isinstance(answer, Solved) else math.inf


def planned_by_memplan(captured: Trace, run: Trace, seconds: float) -> Outcome:
    """Our plan of `captured`, serving `run`."""
    start = time.perf_counter()
    made = make_round(step_requests(captured))
    windows = dynamic_windows(made)
    problem, rows = round_problem(made, windows.blocks)
    answer = minimise(problem, deadline=Deadline(seconds), within=CLOSE)
    assert not isinstance(answer, Infeasible)
    layout = answer.solution if isinstance(answer, Solved) else answer.best
    assert layout is not None
    offsets, blocks = offsets_of(made, windows.blocks, rows, layout)
    spent = time.perf_counter() - start
    outcome = _under_plan(run, made, windows, offsets, blocks, layout, spent)
    return replace(outcome, load_bytes=problem.max_load, planned=len(made.planned))


def planned_by_stalloc(captured: Trace, run: Trace) -> Outcome:
    """STAlloc's plan of `captured`, serving `run`; its dynamic requests have no room of their own,
    only what the static ones leave."""
    start = time.perf_counter()
    made = make_round(step_requests(captured))
    layout = stalloc(free_problem(made), *release_phases(captured, made))
    spent = time.perf_counter() - start
    windows = dynamic_windows(made)
    none = np.zeros(len(windows.blocks), np.int64)
    windows = replace(windows, blocks=replace(windows.blocks, size=none))
    offsets = np.full(len(made), -1, np.int64)
    offsets[made.planned] = layout.offsets
    return _under_plan(run, made, windows, offsets, none, layout, spent)


def free_problem(made: Round) -> Problem:
    """The round's problem without twins, for planners that know none: what lives across the cut is
    in use over the whole round. Rows are those of `planned`."""
    planned = made.planned
    lower, upper = made.lower[planned], made.upper[planned]
    around = upper > made.end
    return make_problem(
        np.where(around, made.start, lower),
        np.minimum(upper, made.end),
        rounded(made.bytes[planned]),
        alignment=np.full(len(planned), ROUNDING, np.int64),
    )


def release_phases(trace: Trace, made: Round) -> tuple[I64, I64]:
    """By planned row: numbers of the phases of allocation and release, over the whole job; what
    stays is released in a last one."""
    table = find_steps(trace)
    number = np.zeros(len(trace) + 1, np.int64)
    number[table.phases.start] += 1
    number = np.cumsum(number)[:-1]
    if not len(table.phases):
        number = np.cumsum(np.diff(trace.events.phase, prepend=Phase.SETUP) != 0)
    alloc, upper = made.alloc[made.planned], made.upper[made.planned]
    last = np.where(upper > len(trace), upper - made.clock, upper) - 1
    release = number[last]
    stays = (made.planned < made.setup) & (upper == made.end)
    return number[alloc], np.where(stays, int(number.max()) + 1, release)


def _under_plan(
    run: Trace,
    made: Round,
    windows: Windows,
    offsets: I64,
    blocks: I64,
    layout: Layout,
    spent: float,
) -> Outcome:
    part, requests = allocation_part(made, windows, offsets, blocks, layout, 0)
    reserved = timeline_under(run, part, requests).reserved_peak_bytes
    return Outcome(
        efficiency=allocated_peak(run) / reserved,
        reserved_bytes=reserved,
        arena_bytes=layout.height,
        missed=serve(run, part, requests).missed,
        seconds=spent,
    )
