"""Steps: streams and host wait for each other as the trace says; collectives by link."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from memplan.timing.collectives import collective_kind, collective_seconds
from memplan.timing.step import (
    COMMUNICATION,
    collective_times,
    priced_step,
    state_wait,
    step_time,
)
from memplan.timing.table import kernel_times
from memplan.timing.timeline import SteadyRun, steady_run
from memplan.types.builder import TraceBuilder
from memplan.types.device import find_profile
from memplan.types.op_names import STATE_TO_CARD, STATE_TO_HOST
from memplan.types.step_time import InputTime
from memplan.types.trace import EventKind, Phase, Trace, TraceMeta

H100, RTX = find_profile("h100"), find_profile("rtx3090")


def built(moves: list[tuple[str, int]]) -> Trace:
    """Operators (`op`, stream), and events (`record`, `wait`: stream, of one event) in order."""
    builder = TraceBuilder()
    for kind, stream in moves:
        if kind == "op":
            builder.begin_op("aten.add.Tensor", stream=stream)
            builder.op_work(flops=0, moved_bytes=4)
        elif kind == "synchronize":
            builder.append(EventKind.SYNCHRONIZE, stream=stream)
        else:
            event = EventKind.EVENT_RECORD if kind == "record" else EventKind.EVENT_WAIT
            builder.append(event, stream=stream, aux=1)
    return builder.build(TraceMeta())


def run_of(moves: list[tuple[str, int]], device: list[float], host: float) -> SteadyRun:
    trace = built(moves)
    count = len(trace.ops)
    return steady_run(trace, 0, count, np.array(device), np.full(count, host))


def took(moves: list[tuple[str, int]], device: list[float], host: float) -> float:
    return run_of(moves, device, host).seconds


def test_one_stream_adds_up_and_the_host_can_be_slower() -> None:
    ops = [("op", 0)] * 3
    assert took(ops, [1.0, 2.0, 3.0], 0.1) == pytest.approx(6.0)
    assert took(ops, [1.0, 2.0, 3.0], 5.0) == pytest.approx(15.0)


def test_streams_run_side_by_side_until_they_meet() -> None:
    apart = [("op", 0), ("op", 1), ("op", 0)]
    assert took(apart, [1.0, 4.0, 2.0], 0.0) == pytest.approx(4.0)
    meet = [("op", 0), ("record", 0), ("wait", 1), ("op", 1), ("record", 1), ("wait", 0), ("op", 0)]
    assert took(meet, [1.0, 4.0, 2.0], 0.0) == pytest.approx(7.0)


def test_a_host_that_waits_launches_late() -> None:
    waits = [("op", 0), ("synchronize", -1), ("op", 0)]
    assert took(waits, [2.0, 0.5], 1.0) == pytest.approx(1.0 + 2.0 + 1.0)


def reference(
    moves: list[tuple[str, int]], device: list[float], host: float
) -> tuple[float, list[float]]:
    """The same, operator by operator: the second run's seconds, and when each of its ends."""
    clock, streams, event, ends = 0.0, [0.0, 0.0], 0.0, []
    each: list[float] = []
    for _ in range(2):
        costs = iter(device)
        each.clear()
        for kind, stream in moves:
            if kind == "op":
                clock += host
                streams[stream] = max(streams[stream], clock) + next(costs)
                each.append(streams[stream])
            elif kind == "record":
                event = streams[stream]
            elif kind == "wait":
                streams[stream] = max(streams[stream], event)
            else:
                clock = max(clock, *streams)
        ends.append(max(clock, *streams))
    return ends[1] - ends[0], each


@pytest.mark.parametrize("seed", range(30))
def test_the_running_maximum_is_the_obvious_loop(seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds = ["op"] * 6 + ["record", "wait", "synchronize"]
    moves = [("op", 0)] + [(str(random.choice(kinds)), int(random.integers(2))) for _ in range(40)]
    moves = [(kind, -1 if kind == "synchronize" else stream) for kind, stream in moves]
    device = random.exponential(1.0, sum(kind == "op" for kind, _ in moves)).tolist()
    host = float(random.choice([0.1, 1.0, 3.0]))
    seconds, ends = reference(moves, device, host)
    assert run_of(moves, device, host).seconds == pytest.approx(seconds)
    assert run_of(moves, device, host).ends.tolist() == pytest.approx(ends)


def test_collectives_by_algorithm_and_link() -> None:
    links = kernel_times().links

    def seconds(name: str, text: str, moved: int) -> float:
        return collective_seconds(name, text, moved, H100, links) - links.latency_us * 1e-6

    gib = 1 << 30
    gathered = seconds("c10d._allgather_base_.default", "[8,8]", gib * 9 // 8)
    assert gathered == pytest.approx(gib * 7 / 8 / (450e9 * links.efficiency), rel=1e-3)
    reduced = seconds("c10d.allreduce_.default", "[8,8]", 2 * gib)
    assert reduced == pytest.approx(2 * gathered, rel=1e-3)
    one_a_node = seconds("c10d.allreduce_.default", "[4,1]", 2 * gib)
    assert one_a_node > 5 * reduced
    assert collective_seconds("c10d.allreduce_.default", "[1,1]", gib, H100, links) == 0.0
    pcie = collective_seconds("c10d.allreduce_.default", "[8,8]", 2 * gib, RTX, links)
    assert pcie > 10 * reduced


def trained(collective: bool) -> Trace:
    """Three steps of a product, and of a collective on a stream of its own."""
    builder = TraceBuilder()
    for step in range(3):
        builder.step = step
        product = builder.new_storage()
        builder.append(EventKind.ALLOC, product, 2 * 8192**2)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            builder.phase = phase
            builder.begin_op("aten.mm.default")
            text = "8192x8192:bfloat16:c 8192x8192:bfloat16:c"
            builder.op_work(flops=2 * 8192**3, moved_bytes=3 * 2 * 8192**2, operands=text)
        if collective:
            builder.append(EventKind.EVENT_RECORD, stream=0, aux=1)
            builder.append(EventKind.EVENT_WAIT, stream=7, aux=1)
            builder.begin_op("c10d.allreduce_.default", stream=7)
            builder.op_work(flops=0, moved_bytes=1 << 30, operands="[8,8]")
            builder.append(EventKind.EVENT_RECORD, stream=7, aux=2)
            builder.append(EventKind.EVENT_WAIT, stream=0, aux=2)
        builder.append(EventKind.FREE, product)
    return builder.build(TraceMeta(optimizer_steps=3, steady_steps=[1, 2]))


def test_a_step_is_told_with_what_it_consists_of() -> None:
    alone, together = (step_time(trained(one), H100) for one in (False, True))
    assert alone is not None and together is not None
    assert alone.exposed_communication_seconds is None
    assert together.exposed_communication_seconds == pytest.approx(together.seconds - alone.seconds)
    assert together.kernel_seconds[COMMUNICATION] > 0
    assert alone.low_seconds < alone.seconds < alone.high_seconds
    flops = 2 * 2 * 8192**3
    used = flops / H100.peak_flops["bf16"] / alone.seconds
    assert alone.model_flops_utilisation == pytest.approx(used) and alone.peak_rate == "bf16"
    assert 0.5 < used < 0.95


@pytest.mark.parametrize("workers", [0, 2, 1000])
def test_input_that_workers_do_not_hide_behind_the_step(workers: int) -> None:
    trace = trained(False)
    step = step_time(trace, H100)
    assert step is not None and step.input_seconds is None and step.exposed_input_seconds is None
    batches = [InputTime(5 * step.seconds, 2.0, workers)]
    fed = replace(trace, meta=msgspec.structs.replace(trace.meta, inputs=batches))
    found = step_time(fed, H100)
    assert found is not None and found.seconds == step.seconds
    assert found.input_seconds == pytest.approx(10 * step.seconds)
    left = max(10 / workers - 1, 0) if workers else 10
    assert found.exposed_input_seconds == pytest.approx(left * step.seconds)


def test_kinds_of_collectives_with_their_share() -> None:
    priced = priced_step(trained(True), H100)
    assert priced is not None
    (one,) = collective_times(priced)
    told = step_time(trained(True), H100)
    assert told is not None
    assert (one.kind, one.ranks, one.nodes, one.count) == ("all-reduce", 8, 1, 1)
    assert one.bytes == 1 << 29, "what goes in and comes out is the same data"
    assert one.seconds == pytest.approx(told.kernel_seconds[COMMUNICATION])
    assert one.exposed_seconds == told.exposed_communication_seconds
    assert one.exposed_seconds == pytest.approx(one.seconds), "the stream waits for it"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("c10d._allgather_base_.default", "all-gather"),
        ("c10d.reduce_scatter_tensor_coalesced_.default", "reduce-scatter"),
        ("c10d.allreduce_.default", "all-reduce"),
        ("c10d.alltoall_base_.default", "all-to-all"),
        ("c10d.broadcast_.default", "broadcast"),
        ("c10d.recv_any_source_.default", "recv"),
        ("c10d.reduce_.default", "reduce"),
        ("symm_mem.multimem_all_gather_out.default", "all-gather"),
        ("symm_mem.stream_write_value32_.default", "stream_write_value32_"),
    ],
)
def test_names_of_collectives(name: str, kind: str) -> None:
    assert collective_kind(name) == kind


def test_a_card_without_measured_steps_has_a_wider_interval() -> None:
    measured, assumed = (step_time(trained(False), card) for card in (H100, find_profile("b200")))
    assert measured is not None and assumed is not None
    width = [one.high_seconds / one.low_seconds for one in (measured, assumed)]
    assert width[1] == pytest.approx(width[0] * kernel_times().interval.elsewhere ** 2)


def test_without_a_step_nothing_is_told() -> None:
    assert step_time(TraceBuilder().build(TraceMeta()), H100) is None


def moving_state(*, in_backward: bool) -> Trace:
    """Two products, and state that comes and goes beside the second, or after it."""
    builder = TraceBuilder()

    def product(phase: Phase) -> None:
        builder.phase = phase
        builder.begin_op("aten.mm.default")
        text = "8192x8192:bfloat16:c 8192x8192:bfloat16:c"
        builder.op_work(flops=2 * 8192**3, moved_bytes=3 * 2 * 8192**2, operands=text)

    def copies() -> None:
        for stream, name in ((1, STATE_TO_CARD), (2, STATE_TO_HOST)):
            builder.begin_op(name, stream=stream)
            builder.op_work(flops=0, moved_bytes=1 << 24)

    for step in range(3):
        builder.step = step
        product(Phase.FORWARD)
        if in_backward:
            copies()
        product(Phase.BACKWARD)
        builder.append(EventKind.EVENT_RECORD, stream=0, aux=1)
        if not in_backward:
            builder.append(EventKind.EVENT_WAIT, stream=1, aux=1)
            builder.append(EventKind.EVENT_WAIT, stream=2, aux=1)
            copies()
        builder.append(EventKind.SYNCHRONIZE, stream=-1)
    return builder.build(TraceMeta(optimizer_steps=3, steady_steps=[1, 2]))


def test_a_step_waits_for_state_that_nothing_runs_beside() -> None:
    """Both directions go at once; the step's own time is without the link."""
    copy = (1 << 24) / H100.host_link_bytes_per_second
    after = moving_state(in_backward=False)
    assert state_wait(after, H100) == pytest.approx(copy)
    beside = moving_state(in_backward=True)
    assert state_wait(beside, H100) == pytest.approx(0.0, abs=1e-9)
    told = [step_time(one, H100) for one in (after, beside)]
    assert told[0] is not None and told[1] is not None
    assert told[0].seconds == pytest.approx(told[1].seconds, rel=1e-3)
    assert state_wait(trained(collective=True), H100) is None
