from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.phases import (
    Step,
    find_steps,
    request_signature,
)
from memplan.phases.requests import REQUESTS
from memplan.types.builder import TraceBuilder
from memplan.types.trace import EventKind, Phase, Trace, TraceMeta

several = settings(max_examples=60, deadline=None)

modules = st.sampled_from(["", "Net", "Net.a", "Net.a.b", "Net.a.b.c", "Net.ab", "Loss"])
phases = st.sampled_from([Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION, Phase.OTHER])
pieces = st.lists(st.tuples(phases, modules, st.integers(1, 4)), min_size=1, max_size=8)


class Job:
    """Builds a captured trace by hand."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()
        self.edges: list[int] = []

    def touch(self, nbytes: int, times: int = 1, *, keep: bool = False) -> None:
        for _ in range(times):
            storage = self.builder.new_storage()
            self.builder.append(EventKind.ALLOC, storage, nbytes)
            if not keep:
                self.builder.append(EventKind.FREE, storage, nbytes)

    def setup(self) -> None:
        self.builder.phase = Phase.SETUP
        self.touch(4096, 3, keep=True)

    def step(self, parts: list[tuple[Phase, str, int]], *, extra: int = 0) -> None:
        builder = self.builder
        self.edges.append(len(builder))
        for index, (phase, module, times) in enumerate(parts):
            builder.phase, builder.module = phase, builder.intern(module)
            self.touch(512 * (index + 1) + extra, times)
        builder.phase, builder.module = Phase.OPTIMIZER, 0
        self.touch(100)
        builder.step += 1

    def trace(self) -> Trace:
        return self.builder.build(TraceMeta())


@several
@given(pieces, st.integers(0, 4), st.booleans())
def test_steps_are_cut_where_the_optimizer_ends(
    parts: list[tuple[Phase, str, int]], steps: int, trailing: bool
) -> None:
    job = Job()
    job.setup()
    for _ in range(steps):
        job.step(parts)
    job.edges.append(len(job.builder))
    if trailing:
        job.builder.phase = Phase.EVALUATION
        job.touch(77)
    trace = job.trace()
    table = find_steps(trace)
    finished = steps if trailing else max(steps - 1, 0)
    assert [table[i] for i in range(len(table))] == [
        Step(*pair) for pair in zip(job.edges[:finished], job.edges[1:], strict=False)
    ]
    assert table.steady == (0 if finished > 1 else None)


@several
@given(st.lists(pieces, min_size=1, max_size=3))
def test_spans_agree_with_a_walk_over_the_events(
    programs: list[list[tuple[Phase, str, int]]],
) -> None:
    job = Job()
    job.setup()
    for parts in [*programs, programs[0]]:
        job.step(parts)
    job.touch(5)
    trace = job.trace()
    table = find_steps(trace)
    assert len(table) == len(programs) + 1

    walked: list[tuple[int, int, int, int]] = []
    for row in range(len(table)):
        for index in range(*table[row]):
            phase = trace.event(index).phase
            if walked and walked[-1][:2] == (row, phase) and walked[-1][3] == index:
                walked[-1] = (*walked[-1][:3], index + 1)
            else:
                walked.append((row, phase, index, index + 1))
    spans = table.phases
    assert walked == rows(spans.step, spans.phase, spans.start, spans.stop)


def rows(*columns: np.ndarray) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_micro_batches_are_counted_in_each_step() -> None:
    job = Job()
    accumulation = [(Phase.FORWARD, "Net", 2), (Phase.BACKWARD, "Net", 2)] * 3
    for _ in range(2):
        job.step([*accumulation, (Phase.EVALUATION, "Net", 1)])
    job.touch(5)
    spans = find_steps(job.trace()).phases
    assert spans.micro_batch[spans.step == 1].tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    forward = spans.phase == Phase.FORWARD
    assert spans.micro_batch[forward].tolist() == [0, 1, 2, 0, 1, 2]


def test_the_steady_step_is_the_first_that_is_repeated() -> None:
    parts = [(Phase.FORWARD, "Net", 2), (Phase.BACKWARD, "Net", 1)]
    job = Job()
    for extra in (7, 3, 0, 0, 0):
        job.step(parts, extra=extra)
    job.touch(5)
    trace = job.trace()
    table = find_steps(trace)
    assert table.steady == 2
    signatures = [request_signature(trace, *table[step]) for step in range(len(table))]
    assert len(set(signatures)) == 3 and signatures[2] == signatures[4]


def test_a_step_of_which_there_is_one_is_not_steady() -> None:
    job = Job()
    parts = [(Phase.FORWARD, "Net", 2)]
    for extra in (0, 9):
        job.step(parts, extra=extra)
        job.touch(1)
        assert find_steps(job.trace()).steady is None


events = st.lists(
    st.tuples(st.sampled_from(EventKind), st.integers(0, 1 << 40), st.integers(-1, 3)), max_size=40
)


def trace_of(made: list[tuple[EventKind, int, int]]) -> Trace:
    builder = TraceBuilder()
    for kind, nbytes, stream in made:
        builder.append(kind, -1, nbytes, stream=stream)
    return builder.build(TraceMeta())


@several
@given(events, events)
def test_signatures_are_equal_exactly_when_the_requests_are(
    left: list[tuple[EventKind, int, int]], right: list[tuple[EventKind, int, int]]
) -> None:
    trace = trace_of([*left, *right])
    a, b = (0, len(left)), (len(left), len(trace))
    same = [e for e in left if e[0] in REQUESTS] == [e for e in right if e[0] in REQUESTS]
    assert (request_signature(trace, *a) == request_signature(trace, *b)) == same


def test_traces_without_anything_to_find() -> None:
    for made in ([], [(EventKind.ALLOC, 5, 0)], [(EventKind.SYNCHRONIZE, 0, -1)]):
        table = find_steps(trace_of(made))
        assert len(table) == len(table.phases) == 0


def test_a_log_of_requests_names_no_steps(memplan_test_data: Path) -> None:
    from memplan.capturing.importers.load_any import load_any

    for name in ("transformer_45154MiB.csv", "conv_8768MiB.csv"):
        assert len(find_steps(load_any(memplan_test_data / "allocator" / name))) == 0
