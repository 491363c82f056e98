from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memplan.order.evaluate import held, peak, program_order
from memplan.phases import find_steps, op_graph
from memplan.phases.op_dependencies import dependencies
from memplan.phases.op_graph import RELEASE
from memplan.types.builder import TraceBuilder
from memplan.types.errors import NoAnswerError, UsageError
from memplan.types.graph import Graph
from memplan.types.trace import EventKind, Phase, Role, Trace, TraceMeta
from tests.capturing.jobs import record
from tests.phases.step_jobs import Residual, mlp, true_peak
from tests.phases.test_step_graph import Hand

# By hand


def loop() -> Hand:
    """Two steps of: x → h → loss, backward into a gradient, an update with a temporary; the
    gradient of the step before goes first, and `h` later than after its last use."""
    hand = Hand()
    hand.phase(Phase.SETUP)
    hand.op("empty", makes="weight=1000")
    for step in range(2):
        hand.phase(Phase.FORWARD)
        if step:
            hand.free("grad")
        hand.op("mul", "weight", "h=200")
        hand.op("view", "h")
        hand.op("sum", "h", "loss=4")
        hand.scratch(60, 90)
        hand.phase(Phase.BACKWARD)
        hand.op("expand", "loss h", "wide=300")
        hand.op("mm", "wide", "grad=1000")
        hand.builder.set_role(hand.numbers["grad"], Role.GRADIENT, "grad")
        hand.free("h wide")
        hand.phase(Phase.OPTIMIZER)
        hand.op("sqrt", "grad", "root=1000")
        hand.op("addcdiv_", "grad root", writes="weight")
        hand.free("root loss")
        hand.end_step()
    return hand


def test_operators_and_values_by_hand() -> None:
    trace = loop().builder.build(TraceMeta())
    graph = op_graph(trace)
    short = [name.removeprefix("aten.").removesuffix(".default") for name in graph.name]
    assert short == ["mul", "sum", "expand", "mm", RELEASE, "sqrt", "addcdiv_", RELEASE]
    assert graph.base_bytes == 1000
    assert graph.scratch.tolist() == [0, 90, 0, 0, 0, 0, 0, 0]
    names = dict(zip(graph.value_name, range(graph.values), strict=True))
    assert sorted(names) == ["grad", "h", "loss", "root", "wide"]
    assert not graph.lasts.any()  # the next step lets go of the gradient unread
    assert graph.users_of(names["h"]).tolist() == [1, 2, 4]
    assert graph.users_of(names["loss"]).tolist() == [2, 7]
    assert graph.users_of(names["grad"]).tolist() == [5, 6]
    assert graph.before_of(4).tolist() == [0, 1, 2]  # `h` may go once it is used
    assert graph.before_of(6).tolist() == [0, 3, 5]  # `weight` was read before it is changed
    assert held(graph, program_order(graph)).tolist() == [
        1200, 1294, 1504, 2504, 2204, 3004, 3004, 1004
    ]  # fmt: skip
    assert peak(graph, program_order(graph)) == true_peak(trace, 1)


def test_gradients_last_where_the_next_step_reads_them() -> None:
    hand = Hand()
    hand.phase(Phase.FORWARD)
    hand.op("full", makes="grad=10")
    hand.builder.set_role(hand.numbers["grad"], Role.GRADIENT, "grad")
    hand.end_step()
    hand.op("add_", "grad", writes="grad")
    hand.free("grad")
    hand.end_step()
    graph = op_graph(hand.builder.build(TraceMeta()), step=0)
    assert graph.lasts.tolist() == [True]


def test_what_keeps_the_order_of_operators() -> None:
    def before(*rows: tuple[str, list[int], list[int]]) -> list[set[int]]:
        names, reads, writes = zip(*rows, strict=True)
        return dependencies(names, reads, writes)

    assert before(
        ("aten.add.Tensor", [0], [1]),
        ("aten.mul.Tensor", [0], [2]),
        ("aten.add_.Tensor", [0], [0]),  # reads before it writes
        ("aten.neg.default", [0], [3]),
        ("aten.zero_.default", [], [0]),
    ) == [set(), set(), {0, 1}, {2}, {2, 3}]
    assert before(
        ("aten.native_dropout.default", [0], [1]),
        ("aten.relu.default", [0], [2]),
        ("aten.normal_.default", [3], [3]),
    ) == [set(), set(), {0}]
    assert before(
        ("c10d.allreduce_.default", [0], [0]),
        ("aten.relu.default", [1], [2]),
        ("mylib.step.default", [1], [3]),
    ) == [set(), set(), {0}]
    assert before(
        ("aten.relu.default", [0], [1]),
        ("aten._local_scalar_dense.default", [0], []),
        ("aten.relu.default", [0], [2]),
        ("aten.relu.default", [0], [3]),
    ) == [set(), set(), {1}, {1}]


# Captured


def job(make: Callable[[], nn.Module], shape: tuple[int, ...], zero_first: bool) -> Trace:
    def train() -> None:
        model = make().to("cuda")
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        for _ in range(4):
            if zero_first:
                optimizer.zero_grad()
            loss = model(torch.randn(shape, device="cuda")).square().sum()
            if not zero_first:
                optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return record(train)


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize(("make", "shape"), [(mlp, (8, 64)), (Residual, (2, 3, 16, 16))])
def test_program_order_holds_what_the_step_holds(
    make: Callable[[], nn.Module], shape: tuple[int, ...], zero_first: bool
) -> None:
    trace = job(make, shape, zero_first)
    table = find_steps(trace)
    for step in range(len(table)):
        graph = op_graph(trace, step)
        assert peak(graph, program_order(graph)) == true_peak(trace, step)
    graph = op_graph(trace)
    assert graph.bytes[graph.lasts].tolist() == [4]  # the loss: gradients go with the next step
    norm = max(op for op, name in enumerate(graph.name) if "linalg_vector_norm" in name)
    updates = [op for op, name in enumerate(graph.name) if "addcdiv_" in name]
    assert len(updates) == 4 if make is mlp else 8
    assert all(_needs(graph, op, norm) for op in updates)  # clipping is a barrier


def test_gradients_that_meet_keep_their_order() -> None:
    """The engine adds one to the other in place: what follows needs both."""
    graph = op_graph(job(Residual, (2, 3, 16, 16), zero_first=True))
    second, first = [op for op, n in enumerate(graph.name) if "convolution_backward" in n]
    sums = [op for op, n in enumerate(graph.name) if n == "aten.add_.Tensor" and op > second]
    assert any(_needs(graph, op, second) and _needs(graph, first, op) for op in sums)


def test_what_python_reads_is_a_barrier() -> None:
    def train() -> None:
        model = mlp().to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64, device="cuda")).square().sum()
            loss.backward()
            if loss.item() < 1e6:
                optimizer.step()

    graph = op_graph(record(train))
    read = graph.name.index("aten._local_scalar_dense.default")
    updates = [op for op, name in enumerate(graph.name) if op > read and "add_" in name]
    assert len(updates) == 4 and all(_needs(graph, op, read) for op in updates)


def _needs(graph: Graph, op: int, other: int) -> bool:
    waiting, found = [op], set[int]()
    while waiting:
        for needed in graph.before_of(waiting.pop()).tolist():
            if needed not in found:
                found.add(needed)
                waiting.append(needed)
    return other in found


# Refusals


def test_traces_without_operators_or_steps() -> None:
    builder = TraceBuilder()
    number = builder.new_storage()
    builder.append(EventKind.ALLOC, number, 10)
    with pytest.raises(NoAnswerError, match="not the operators"):
        op_graph(builder.build(TraceMeta(origin="csv")))
    hand = Hand()
    hand.phase(Phase.FORWARD)
    hand.op("full", makes="x=10")
    with pytest.raises(NoAnswerError, match="no complete step"):
        op_graph(hand.builder.build(TraceMeta()))


def test_a_step_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="there is no step 2"):
        op_graph(loop().builder.build(TraceMeta()), step=2)
