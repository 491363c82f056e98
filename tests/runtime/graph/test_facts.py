"""What is claimed of a graph's operators, held against real tensors: where results lie, what is
written, what is alive, and that any order which the dependencies allow gives the same bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memplan
from bench.recompute.tracker import measure
from memplan.order.evaluate import held, peak
from memplan.runtime.graph import step_capture as stepping
from memplan.runtime.graph.compiled_graph import CompiledGraph
from memplan.runtime.graph.execute import called
from memplan.runtime.graph.joint import LossGradient
from memplan.runtime.graph.operator_graph import OperatorGraph
from memplan.runtime.graph.ordering import Ordering
from memplan.runtime.graph.program import MemplanOp, facts_of, tensors
from memplan.runtime.graph.report import ProgramReport
from memplan.runtime.graph.step import CompiledStep
from memplan.runtime.graph.updates import Updates
from tests.capturing.jobs import record
from tests.order.graphs import random_order
from tests.runtime.graph.test_models import IMAGES, MODELS, Norm, language_model
from tests.runtime.graph.test_optimizers import OPTIMIZERS
from tests.runtime.graph.training import (
    Job,
    assert_as_plain,
    assert_captured,
    captures_steps,
    classifier,
)

pytestmark = captures_steps

JOBS: dict[str, Callable[[], Job]] = {
    **MODELS,
    "transformer": language_model,
    "sgd": lambda: classifier(Norm, lambda m: torch.optim.SGD(m.parameters(), 0.1), IMAGES),
}


def compiled(
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    order: Callable[[OperatorGraph], list[int]] | None = None,
) -> tuple[CompiledStep[...], list[OperatorGraph]]:
    """A step in any order, and the graphs that it makes."""
    found: list[OperatorGraph] = []
    choose = stepping.choose_order  # type: ignore[attr-defined]

    def chosen(graph: OperatorGraph, **options: Any) -> Ordering:
        found.append(graph)
        if order is None:
            return choose(graph, **options)
        rows = order(graph)
        least = peak(graph.graph, rows)
        report = ProgramReport(len(rows), least, least, least, 0, 0.0)
        return Ordering(graph.schedule(rows), report)

    monkeypatch.setattr(stepping, "choose_order", chosen)
    step = memplan.compile(job.loss_fn, optimizer=list(job.optimizers), order=False)
    return step, found


class Watcher:
    """Stands in for the operators of an executable, and looks at what each does."""

    def __init__(self, step: CompiledStep[...]) -> None:
        (program,) = step._capture.programs
        assert isinstance(program, CompiledGraph)
        self.program = program
        self.faults: list[str] = []
        self.calls = 0
        executable = self.program.step.executable
        self._waiting = iter(executable.nodes)
        space = executable._space
        self._targets = {
            called(node)
            for node in executable.nodes
            if isinstance(node.target, (MemplanOp, torch._ops.OpOverload))
        }
        for name, value in list(space.items()):
            if _hashable(value) and value in self._targets:
                space[name] = self._watched(value)

    def _watched(self, call: Any) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            node = next(
                one
                for one in self._waiting
                if isinstance(one.target, (MemplanOp, torch._ops.OpOverload))
            )
            given = tensors([args, kwargs])
            before = [one.detach().clone() for one in given]
            result = call(*args, **kwargs)
            self.calls += 1
            self._look(node, given, before, tensors(result))
            return result

        return watched

    def _look(
        self, node: fx.Node, given: list[Tensor], before: list[Tensor], results: list[Tensor]
    ) -> None:
        facts = facts_of(node)
        operands = [one for one in node.all_input_nodes if facts_of(one).storage is not None]
        shown = {one.untyped_storage()._cdata: one for one in given}
        for one, old in zip(given, before, strict=True):
            if not torch.equal(one.detach(), old) and not one.isnan().any() and not facts.writes:
                self.faults.append(f"{node.format_node()}: writes what it does not say")
        for result in results:
            mine = result.untyped_storage()._cdata in shown
            if mine and facts.makes and facts.storage in (None, *facts.makes):
                self.faults.append(f"{node.format_node()}: gives a view, not a new storage")
            if not mine and facts.no_kernel and operands:
                self.faults.append(f"{node.format_node()}: gives new memory, not a view")


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def assert_operators_do_what_is_claimed(step: CompiledStep[...], batch: tuple[Any, ...]) -> None:
    watcher = Watcher(step)
    step(*batch)
    assert watcher.calls > 10
    assert not watcher.faults, watcher.faults[:5]


@pytest.mark.parametrize("name", sorted(JOBS.keys() - MODELS.keys()))
def test_operators_do_what_is_claimed(name: str) -> None:
    """Of the other jobs, `test_what_is_measured_is_not_more_than_what_is_promised` checks it."""
    torch.manual_seed(1)
    job = JOBS[name]()
    step = memplan.compile(job.loss_fn, optimizer=list(job.optimizers), order=False)
    for batch in job.batches[:2]:
        step(*batch)
    assert not step.report().fallback, step.report()
    assert_operators_do_what_is_claimed(step, job.batches[2])


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", [0, 100])
def test_the_bits_are_the_same_in_any_order(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = count(seed)

    def any_order(graph: OperatorGraph, **_options: Any) -> Ordering:
        rows = random_order(graph.graph, next(seeds))
        least = peak(graph.graph, rows)
        report = ProgramReport(len(rows), least, least, least, 0, 0.0)
        return Ordering(graph.schedule(rows), report)

    monkeypatch.setattr(stepping, "choose_order", any_order)
    step, _ = assert_as_plain(JOBS[name], keep_gradients=bool(seed))
    assert_captured(step, 4)


class Tracker(TorchDispatchMode):
    """Adds up the storages that operators were given or gave, for as long as they live."""

    def __init__(self, there: list[Tensor]) -> None:
        super().__init__()
        self.bytes = 0
        self.rows: list[tuple[Any, int]] = []
        """Each operator, and the bytes when it has run."""
        self._known: dict[int, int] = {}
        self._see(there)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(tensors(result))
        self.rows.append((func, self.bytes))
        return result

    def _see(self, found: list[Tensor]) -> None:
        for one in found:
            storage = one.untyped_storage()
            if storage._cdata not in self._known:
                self._known[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        self.bytes -= self._known.pop(key)


@pytest.mark.parametrize("name", ["norm", "u-net", "sgd", "experts"])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_live_bytes_are_those_that_are_predicted(
    name: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every operator of a real run; the optimizer's are not the graph's."""
    torch.manual_seed(1)
    job = JOBS[name]()
    rows: list[int] = []

    def order(graph: OperatorGraph) -> list[int]:
        rows[:] = range(len(graph.nodes)) if seed is None else random_order(graph.graph, seed)
        return rows

    step, found = compiled(job, monkeypatch, order)
    step(*job.batches[0])
    (made,) = step._capture.programs
    values: list[Any] = []
    run = made.run

    def kept(primals: list[Any]) -> list[Any]:
        with Tracker(tensors(primals)) as tracker:
            values.append((tracker, sum(tracker._known.values())))
            return run(primals)

    monkeypatch.setattr(made, "run", kept)
    monkeypatch.setattr(
        step._updates, "update", lambda parameter, **_: setattr(parameter, "grad", None)
    )
    step(*job.batches[1])
    ((tracker, _),) = values
    graph = found[0].graph
    predicted = held(graph, np.array(rows)) - found[0].program.base_bytes - graph.scratch[rows]
    seen = iter(tracker.rows)
    compared = 0
    for row, bytes_predicted in zip(rows, predicted, strict=True):
        target = found[0].nodes[row].target
        if isinstance(target, torch._ops.OpOverload):
            got = next(total for func, total in seen if func is target)
            assert got == bytes_predicted, (target, compared)
            compared += 1
    assert compared > 10


def two_of_all(model: nn.Module) -> list[torch.optim.Optimizer]:
    first = torch.optim.Adam(model.parameters(), 1e-2)
    return [first, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)]


OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_grad_norm": 0.1},
    "clipped and gathered": {"clip_grad_norm": 0.1, "accumulate": 2},
    "gathered": {"accumulate": 2},
}


@pytest.mark.parametrize("name", [*MODELS, *OPTIMIZERS, *OPTIONS, "two optimizers of all"])
def test_what_is_measured_is_not_more_than_what_is_promised(name: str) -> None:
    torch.manual_seed(1)
    job = MODELS[name]() if name in MODELS else classifier(make=OPTIMIZERS.get(name, two_of_all))
    options = OPTIONS.get(name, {})
    step = memplan.compile(job.loss_fn, optimizer=list(job.optimizers), order=False, **options)
    for batch in [*job.batches[:2], *job.batches[:1]][: 3 if "accumulate" in options else 2]:
        step(*batch)
    states = [optimizer.state for optimizer in job.optimizers]
    for parameter in {one for state in states for one in state}:
        held = tensors([list(state.get(parameter, {}).values()) for state in states])
        real = sum(one.untyped_storage().nbytes() for one in held)
        assert step._updates.state_bytes(parameter)[0] == real
    parameters = list(job.model.parameters())
    gradients = [one.grad for one in parameters]
    held = tensors([[list(of.values()) for of in state.values()] for state in states])
    there = [*parameters, *tensors(gradients), *job.model.buffers(), *job.batches[2], *held]
    measured = measure(lambda: step(*job.batches[2]), there).peak_bytes
    report = step.report()
    assert not report.fallback
    assert measured <= report.programs[-1].ordered_peak_bytes
    if name in MODELS.keys() - {"lstm"}:
        assert_operators_do_what_is_claimed(step, job.batches[3])


def mixed() -> Job:
    """Under autocast, norms whose input and weights differ in dtype; a scaler."""
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Flatten(2)
    job = classifier(lambda: nn.Sequential(*layers, nn.LayerNorm(4)), sgd, (64, 3, 4, 4))
    job.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return job.model(x).float().square().mean()

    job.loss_fn = loss_fn
    return job


def one_weight() -> Job:
    """A step whose peak is that of the scaler's and clipping's numbers."""
    job = classifier(lambda: nn.Linear(3, 1, bias=False), sgd, (1, 3))
    job.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    job.loss_fn = lambda x, y: job.model(x).square().mean()
    return job


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(("make", "clip"), [(mixed, None), (one_weight, 0.5)])
def test_the_promise_of_a_step_with_a_scaler(make: Callable[[], Job], clip: float | None) -> None:
    torch.manual_seed(1)
    job = make()
    step = memplan.compile(
        job.loss_fn, optimizer=list(job.optimizers), scaler=job.scaler, clip_grad_norm=clip
    )
    step(*job.batches[0])
    assert job.scaler is not None
    numbers = tensors([job.scaler._scale, job.scaler._growth_tracker])
    there = [*job.model.parameters(), *job.model.buffers(), job.batches[1][0], *numbers]
    measured = measure(lambda: step(*job.batches[1]), there).peak_bytes
    assert_captured(step, 2)
    assert measured <= step.report().programs[0].ordered_peak_bytes


def test_the_promise_of_a_step_on_a_card_has_the_numbers_of_scaling_and_clipping() -> None:
    found = []

    def job() -> None:
        weights = [nn.Parameter(torch.ones(1, device="cuda")) for _ in range(300)]
        for one in weights:
            one.grad = torch.ones_like(one)
        optimizer, scaler = torch.optim.SGD(weights, 0.1), torch.amp.GradScaler("cuda")
        updates = Updates([optimizer])
        updates.begin()
        scaler.scale(torch.ones((), device="cuda"))
        before = torch.cuda.memory_allocated()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, 1.0)
        taken = torch.cuda.max_memory_allocated() - before
        found.append((taken, updates.step_scratch_bytes()))
        loss_gradient = LossGradient(torch.ones((), device="cuda").bfloat16(), scaler)
        torch.cuda.reset_peak_memory_stats()
        kept = loss_gradient()
        taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        found.append((taken, loss_gradient.scratch_bytes))
        del kept

    record(job)
    assert len(found) == 2 and all(taken <= promised for taken, promised in found)


def test_a_workspace_that_the_shape_function_does_not_know() -> None:
    """oneDNN's LSTM saves one whose size it chooses; PyTorch says that it is empty."""
    torch.manual_seed(1)
    job = MODELS["lstm"]()
    step = memplan.compile(job.loss_fn, optimizer=list(job.optimizers), order=False)
    step(*job.batches[0])
    (made,) = step._capture.programs
    assert isinstance(made, CompiledGraph)
    program = made.step.program
    for node in program.graph_module.graph.nodes:
        if node.target is torch.ops.aten.mkldnn_rnn_layer.default:
            last = facts_of(node).makes[-1]
            assert node.meta["val"][-1].numel() == 0
            assert program.storages[last].bytes > 0
