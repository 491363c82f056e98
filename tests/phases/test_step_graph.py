from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from memplan.phases import find_steps, plain_peak, step_graph, step_graphs
from memplan.phases.passes import differentiated_bytes, passes_overlap, reads_twice
from memplan.phases.roots import root_names
from memplan.phases.step_graph import alive_rows
from memplan.recompute.evaluate import Evaluator
from memplan.recompute.selection import Selection, as_followed, op_output
from memplan.types.builder import TraceBuilder
from memplan.types.device import find_profile
from memplan.types.errors import NoAnswerError, UsageError
from memplan.types.step_graph import StepGraph
from memplan.types.trace import EventKind, Phase, Provenance, TraceMeta
from tests.capturing.distributed.ranks import capture, join
from tests.capturing.jobs import record
from tests.phases.step_jobs import JOBS, by_module, mlp, training, true_peak

# By hand


class Hand:
    """A trace written row by row; storages have names."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()
        self.numbers: dict[str, int] = {}
        self.sizes: dict[str, int] = {}

    def phase(self, phase: Phase, call: int = -1) -> None:
        self.builder.phase, self.builder.call = phase, call

    def op(self, name: str, reads: str = "", makes: str = "", writes: str = "") -> None:
        """`makes`: `a=100 b=20`; a view moves nothing."""
        builder = self.builder
        builder.begin_op(f"aten.{name}.default", reads=[self.numbers[n] for n in reads.split()])
        made = []
        for item in makes.split():
            label, _, size = item.partition("=")
            made.append(self.alloc(label, int(size)))
        builder.op_writes([*made, *(self.numbers[n] for n in writes.split())])
        builder.op_work(flops=0, moved_bytes=0 if name == "view" else 1000)

    def alloc(self, label: str, size: int) -> int:
        self.numbers[label] = number = self.builder.new_storage(name=label)
        self.sizes[label] = size
        if size:
            self.builder.append(EventKind.ALLOC, number, size)
        return number

    def free(self, labels: str) -> None:
        for label in labels.split():
            self.builder.append(EventKind.FREE, self.numbers[label], self.sizes[label])

    def scratch(self, *sizes: int) -> None:
        """Memory of a kernel, taken and given back one after the other."""
        for size in sizes:
            number = self.builder.new_storage()
            for kind in (EventKind.ALLOC, EventKind.FREE):
                self.builder.append(kind, number, size, provenance=Provenance.RULE)

    def end_step(self) -> None:
        self.builder.step += 1
        self.phase(Phase.FORWARD)
        self.builder.append(EventKind.MARK)

    def graph(self) -> StepGraph:
        return step_graph(self.builder.build(TraceMeta()))


def chain() -> Hand:
    """weight 1000 · x 100 → h 200 → y 300 → loss 4, with what backward makes."""
    hand = Hand()
    hand.phase(Phase.SETUP)
    hand.op("empty", makes="weight=1000 stale=50")
    hand.phase(Phase.FORWARD)
    hand.op("randn", makes="x=100")
    hand.phase(Phase.FORWARD, call=7)
    hand.op("mm", "x weight", "h=200")
    hand.free("stale")
    hand.op("relu", "h", "y=300")
    hand.scratch(60, 90)
    hand.op("view", "y")
    hand.op("mm", "y weight", "z=30")
    hand.phase(Phase.FORWARD)
    hand.op("sum", "z", "loss=4")
    hand.free("z")
    hand.phase(Phase.BACKWARD)
    hand.op("mm", "y weight", "gw=1000 gy=300")
    hand.free("y")
    hand.op("threshold", "gy h", "gh=200")
    hand.free("gy h")
    hand.op("mm", "gh x", writes="gw")
    hand.free("gh")
    hand.phase(Phase.OPTIMIZER)
    hand.op("add_", "weight gw", writes="weight")
    hand.scratch(5000)
    hand.free("gw")
    hand.end_step()
    return hand


def test_a_pass_written_by_hand() -> None:
    hand = chain()
    graph = hand.graph()
    assert graph.ops.name[:4] == [f"aten.{n}.default" for n in ("randn", "mm", "relu", "view")]
    assert (graph.forward_ops, len(graph), graph.passes) == (6, 9, 1)
    assert graph.ops.call.tolist() == [-1, 0, 0, 0, 0, -1, -1, -1, -1]
    assert graph.ops.nth.tolist() == [-1, 0, 0, 0, 1, -1, -1, -1, -1]
    values = {name: number for number, name in enumerate(graph.values.name) if name}
    table = {
        name: tuple(
            int(getattr(graph.values, column)[number]) for column in ("bytes", "alloc", "free")
        )
        for name, number in values.items()
    }
    assert table == {
        "weight": (0, -1, 9),
        "stale": (50, -1, 2),
        "x": (100, 0, 9),
        "h": (200, 1, 8),
        "y": (300, 2, 7),
        "z": (30, 4, 6),
        "loss": (4, 5, 9),
        "gw": (1000, 6, 9),
        "gy": (300, 6, 8),
        "gh": (200, 7, 9),
    }
    assert graph.base_bytes == 1000
    dropped = {name for name, number in values.items() if graph.values.droppable[number]}
    assert dropped == {"h", "y"}
    assert graph.ops.reads_of(2) == [values["h"]] and graph.ops.writes_of(3) == []
    assert graph.ops.seconds[3] == 0.0 and graph.ops.seconds[2] > 0.0


def test_scratch_memory_is_the_last_value_of_its_row() -> None:
    graph = chain().graph()
    *made, scratch = graph.ops.writes_of(2)
    assert [graph.values.name[v] for v in made] == ["y"]
    # The two kernels' memory is never there at the same time.
    assert int(graph.values.bytes[scratch]) == 90
    assert (graph.values.alloc[scratch], graph.values.free[scratch]) == (2, 3)
    assert not graph.values.droppable[scratch]


def test_the_rest_of_the_step_is_the_optimizer() -> None:
    graph = chain().graph()
    assert graph.rest_peak_bytes == 1000 + 100 + 4 + 1000 + 5000
    assert plain_peak(graph) == graph.rest_peak_bytes


def test_empty_outputs_keep_their_place_among_outputs() -> None:
    hand = Hand()
    hand.phase(Phase.FORWARD, call=0)
    hand.op("full", makes="x=10")
    hand.op("attention", "x", "nothing=0 out=70")
    hand.phase(Phase.BACKWARD)
    hand.op("mul", "out x", "g=10")
    hand.end_step()
    graph = hand.graph()
    made = [v for v in graph.ops.writes_of(1) if graph.values.alloc[v] == 1]
    assert [graph.values.name[v] for v in made] == ["nothing", "out"]


def test_what_is_let_go_while_an_operator_runs_does_not_meet_its_result() -> None:
    hand = Hand()
    hand.phase(Phase.FORWARD, call=0)
    hand.op("full", makes="x=10 old=500")
    hand.builder.begin_op("aten.mul.default", reads=[hand.numbers["x"]])
    hand.free("old")
    hand.builder.op_writes([hand.alloc("y", 400)])
    hand.builder.op_work(flops=0, moved_bytes=20)
    hand.phase(Phase.BACKWARD)
    hand.op("mul", "y x", "g=10")
    hand.end_step()
    assert plain_peak(hand.graph()) == 510


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_the_plain_peak_is_the_step_s_to_the_byte(job: Callable[[], None]) -> None:
    trace = record(job)
    last = len(find_steps(trace)) - 1
    assert last > 0
    assert plain_peak(step_graph(trace)) == true_peak(trace, last)
    assert plain_peak(step_graph(trace, step=0)) == true_peak(trace, 0)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_the_graph_agrees_with_itself(job: Callable[[], None]) -> None:
    graph = step_graph(record(job))
    values, ops = graph.values, graph.ops
    for row in range(len(graph)):
        for value in {*ops.reads_of(row), *ops.writes_of(row)}:
            assert values.alloc[value] <= row < values.free[value]
    for value in np.flatnonzero(values.droppable).tolist():
        readers = [
            row for row in range(graph.forward_ops, len(graph)) if value in ops.reads_of(row)
        ]
        writers = [row for row in range(len(graph)) if value in ops.writes_of(row)]
        assert readers and writers[0] == values.alloc[value]
        assert all(ops.replayable[row] and ops.call[row] >= 0 for row in writers)
    assert not ops.replayable[graph.forward_ops :].any()
    assert (ops.seconds >= 0).all() and ops.seconds.sum() > 0


def test_micro_batches_are_passes_alike() -> None:
    trace = record(JOBS["accumulation"])
    graph = step_graph(trace)
    assert graph.passes == 3
    assert graph.rest_peak_bytes < plain_peak(graph)
    single = step_graph(record(JOBS["mlp"]))
    assert graph.ops.name[: graph.forward_ops] == single.ops.name[: single.forward_ops]


def test_what_runs_outside_the_calls_does_not_tell_passes_apart() -> None:
    def job() -> None:
        model = mlp().to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            scale = torch.ones((), device="cuda") * 2.0
            for _ in range(2):
                (model(torch.randn(32, 64, device="cuda")).sum() * scale).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert step_graph(record(job)).passes == 2


def test_what_one_pass_alone_begins_with_does_not_tell_passes_apart() -> None:
    """As buckets that DDP builds anew, or weights that FSDP2 gathers for the first micro-batch."""

    class Begins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.calls = mlp(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls % 2:
                torch.cumsum(self.body.get_parameter("0.weight").detach(), 0)
            out: torch.Tensor = self.body(x)
            return out

    def job() -> None:
        model = Begins().to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(512, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert step_graph(record(job)).passes == 2


def test_passes_that_differ_count_as_the_rest() -> None:
    def job() -> None:
        large, small = mlp().to("cuda"), nn.Sequential(nn.Linear(64, 256), nn.GELU()).to("cuda")
        optimizer = torch.optim.SGD([*large.parameters(), *small.parameters()], 0.1)
        for _ in range(3):
            for model in (large, small):
                model(torch.randn(64, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = record(job)
    graph = step_graph(trace)
    assert graph.passes == 1
    # The other pass holds the input of GELU, its result and their gradients at once.
    assert graph.rest_peak_bytes > graph.base_bytes + 2 * 4 * 64 * 256
    assert plain_peak(graph) == true_peak(trace, 1)


def test_a_job_without_an_optimizer_has_a_graph() -> None:
    def job() -> None:
        mlp().to("cuda")(torch.randn(32, 64, device="cuda")).sum().backward()

    graph = step_graph(record(job))
    assert graph.passes == 1 and by_module(graph)


def test_kinds_of_passes_of_a_job_without_an_optimizer() -> None:
    """Its step is the whole run."""

    def job() -> None:
        large, small = mlp().to("cuda"), nn.Sequential(nn.Linear(64, 256), nn.GELU()).to("cuda")
        for _ in range(2):
            for model in (large, small):
                model(torch.randn(32, 64, device="cuda")).sum().backward()
                model.zero_grad()

    graphs = step_graphs(record(job), None, 0)
    assert [(graph.calls_before, graph.passes) for graph in graphs] == [(0, 2), (1, 2)]
    assert {graph.kinds for graph in graphs} == {(("Sequential",), ("Sequential#1",))}


def test_a_first_pass_that_fills_a_cache_is_no_kind_of_its_own() -> None:
    """A run cannot tell it from the others: it calls the same root."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.table = mlp(), dict[str, torch.Tensor]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.table:
                self.table["twice"] = torch.ones_like(x).mul(2.0)
            return self.layers(x.mul(self.table["twice"]))

    [graph] = step_graphs(record(training(Cached, (32, 64))), None, 0)
    assert graph.kinds == ()


def test_modules_of_a_class_are_told_apart_by_weights_that_autocast_cast_before() -> None:
    def job() -> None:
        one, two = mlp().to("cuda"), mlp().to("cuda")
        x = torch.randn(32, 64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            for model in (one, two, two, one):
                model(x)

    numbers = {0: "Sequential", 1: "Sequential#1", 2: "Sequential#1", 3: "Sequential"}
    assert root_names(record(job)) == numbers


def test_modules_of_a_class_are_told_apart_by_weights_that_fsdp_gathered_before() -> None:
    def job() -> None:
        join()
        one, two = (FullyShardedDataParallel(mlp().to("cuda")) for _ in range(2))
        x = torch.randn(32, 64, device="cuda")
        for model in (one, two, two, one):
            model(x)

    assert [name[-2:] == "#1" for name in root_names(capture(job)).values()] == [0, 1, 1, 0]


def test_a_kind_of_pass_follows_the_plans_of_those_that_begin_alike() -> None:
    """What they add to it counts as well."""

    def job() -> None:
        model, head = mlp().to("cuda"), nn.Linear(64, 4).to("cuda")
        for _ in range(2):
            model(torch.randn(32, 64, device="cuda")).sum().backward()
            head(model(torch.randn(32, 64, device="cuda"))).sum().backward()

    graphs = step_graphs(record(job), None, 0)
    assert {graph.kinds[n] for n, graph in enumerate(graphs)} == {
        ("Sequential",),
        ("Sequential", "Linear"),
    }
    each = [np.flatnonzero(graph.values.droppable).tolist() for graph in graphs]
    value = each[0][0]
    own, other = as_followed(graphs, [Selection((frozenset([value]),)), Selection()])
    assert own.dropped == {value}
    assert [op_output(graphs[1], one).op for one in other.dropped] == [
        op_output(graphs[0], value).op
    ]
    assert Evaluator(graphs[1]).evaluate(other).added_seconds > 0


def test_the_profile_prices_the_operators() -> None:
    trace = record(training(lambda: nn.Linear(2048, 2048), (4096, 2048)))
    slow, fast = (
        float(step_graph(trace, find_profile(card)).ops.seconds.sum())
        for card in ("t4", "h100-80gb")
    )
    assert slow > 5 * fast
    assert float(step_graph(trace).ops.seconds.sum()) == float(
        step_graph(trace, find_profile(trace.meta.gpu)).ops.seconds.sum()
    )


# No answer


def test_traces_without_operators_say_what_to_try() -> None:
    builder = TraceBuilder()
    storage = builder.new_storage()
    for kind in (EventKind.ALLOC, EventKind.FREE):
        builder.append(kind, storage, 512)
    for origin in ("csv", "snapshot"):
        with pytest.raises(NoAnswerError, match=rf"\({origin}\).*requests of memory") as caught:
            step_graph(builder.build(TraceMeta(origin=origin)))
        assert "memplan estimate -o" in caught.value.hint
    builder.begin_op("aten.mm.default")
    with pytest.raises(NoAnswerError, match="older memplan"):
        step_graph(builder.build(TraceMeta()))


def test_jobs_without_backward_say_so() -> None:
    def job() -> None:
        nn.Linear(4, 4).to("cuda")(torch.randn(2, 4, device="cuda"))

    with pytest.raises(NoAnswerError, match="forward and a backward") as caught:
        step_graph(record(job))
    assert "backward()" in caught.value.hint

    def copies() -> None:
        torch.randn(2, 4).to("cuda")

    with pytest.raises(NoAnswerError, match="forward and a backward"):
        step_graph(record(copies))


def test_steps_that_are_not_there() -> None:
    trace = record(JOBS["mlp"])
    for step in (-1, 99):
        with pytest.raises(UsageError, match=f"no step {step}") as caught:
            step_graph(trace, step=step)
        assert "steps 0 to" in caught.value.hint


def test_alive_rows_are_half_open() -> None:
    columns = ([-1, 0, 1], [1, 3, 2], [5, 7, 11])
    alloc, free, size = (np.array(column, np.int64) for column in columns)
    assert alive_rows(3, alloc, free, size).tolist() == [12, 18, 7]


def pipelined() -> None:
    """As the first of two stages goes through its micro-batches."""
    model = mlp().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        waiting = [model(torch.randn(512, 64, device="cuda")).sum()]
        for _ in range(3):
            waiting.append(model(torch.randn(512, 64, device="cuda")).sum())
            waiting.pop(0).backward()
        waiting.pop().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_passes_that_overlap() -> None:
    overlapping = record(pipelined)
    assert passes_overlap(overlapping)
    graph = step_graph(overlapping)
    assert (graph.passes, graph.others) == (4, 1)
    assert graph.values.droppable.any()
    accumulating = record(training(mlp, (512, 64), micro_batches=3))
    assert not passes_overlap(accumulating)
    assert not any(map(differentiated_bytes, (overlapping, accumulating)))
    assert not any(map(reads_twice, (overlapping, accumulating)))


def test_a_graph_that_two_backwards_go_through() -> None:
    def job() -> None:
        body, one, other = mlp().to("cuda"), nn.Linear(64, 2).cuda(), nn.Linear(64, 3).cuda()
        optimizer = torch.optim.SGD([*body.parameters(), *one.parameters()], 0.1)
        for _ in range(4):
            features = body(torch.randn(512, 64, device="cuda"))
            losses = one(features).sum(), other(features).sum()
            losses[0].backward(retain_graph=True)
            losses[1].backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = record(job)
    assert passes_overlap(trace) and reads_twice(trace)


def test_a_gradient_that_is_differentiated() -> None:
    def job() -> None:
        model = nn.Sequential(nn.Linear(64, 256), nn.Sigmoid(), nn.Linear(256, 1)).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            x = torch.randn(512, 64, device="cuda", requires_grad=True)
            [slope] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (model(x).mean() + slope.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    def accumulated() -> None:
        table, out = nn.Embedding(5000, 64, sparse=True).cuda(), nn.Linear(64, 4).cuda()
        out.register_full_backward_hook(lambda _, given, __: kept.append(given))
        optimizer = torch.optim.SGD([*table.parameters(), *out.parameters()], 0.1)
        for _ in range(3):
            for _ in range(3):
                tokens = torch.zeros(256, dtype=torch.long, device="cuda")
                out(table(tokens)).square().mean().backward()
                del kept[:-1]
            optimizer.step()
            optimizer.zero_grad()

    kept: list[Any] = []
    assert differentiated_bytes(record(accumulated)) == 0
    # What the sigmoid gives, at the least, for the gradient of its own and for that of this one.
    assert differentiated_bytes(record(job)) >= 512 * 256 * 4
