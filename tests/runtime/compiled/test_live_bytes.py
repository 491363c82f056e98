"""The bytes that the model of a step predicts are those that a run holds, at every operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from memplan.order.evaluate import held, program_order
from memplan.runtime.compiled.dependencies import operators
from tests.order.graphs import random_order
from tests.runtime.compiled.recorded import Job, executable, image_batches, residual_job


class Tracker(TorchDispatchMode):
    """Adds up the storages that operators were given or gave, for as long as they live."""

    def __init__(self, there: list[Any]) -> None:
        super().__init__()
        self.bytes = 0
        self.rows: list[tuple[Any, int]] = []
        """Each operator, and the bytes when it has run."""
        self._known: dict[int, int] = {}
        self._see(there)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._see([args, list((kwargs or {}).values())])
        result = func(*args, **(kwargs or {}))
        self._see([result])
        self.rows.append((func, self.bytes))
        return result

    def _see(self, items: Any) -> None:
        for item in items:
            if isinstance(item, (list, tuple)):
                self._see(item)
            elif isinstance(item, Tensor) and item.untyped_storage()._cdata not in self._known:
                storage = item.untyped_storage()
                self._known[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        self.bytes -= self._known.pop(key)


def checkpointed() -> Job:
    job = residual_job()
    net: Any = job.model

    def step(x: Tensor, y: Tensor) -> float:
        x = torch.relu(net.norm(net.stem(x)))
        x = x + checkpoint(lambda t: net.drop(net.inner(t)), x, use_reentrant=False)
        F.cross_entropy(net.head(x.mean((2, 3))), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=False)
        return 1.0

    job.step = step
    step(*job.batches[0])
    return job


def accumulating() -> Job:
    job = residual_job(torch.optim.AdamW, foreach=True)

    def step(x: Tensor, y: Tensor) -> dict[str, Any]:
        job.optimizer.zero_grad()
        total: Any = 0.0
        for part in range(2):
            loss = F.cross_entropy(job.model(x[part : part + 1]), y[part : part + 1])
            loss.backward()
            total = total + loss.detach()
        job.optimizer.step()
        return {"loss": total}

    job.step = step
    for net in job.model.modules():
        if isinstance(net, nn.BatchNorm2d):
            net.eval()
    step(*job.batches[0])
    return job


JOBS: dict[str, Callable[[], Job]] = {
    "Adam": residual_job,
    "foreach SGD": lambda: residual_job(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "fused AdamW": lambda: residual_job(torch.optim.AdamW, fused=True),
    "checkpoint, clipping": checkpointed,
    "accumulation": accumulating,
}


@pytest.mark.parametrize("name", JOBS)
def test_predicted_live_bytes_are_those_measured(name: str) -> None:
    job = JOBS[name]()
    program = job.program()
    found = operators(program)
    graph = found.graph
    orders = [program_order(graph).tolist(), *(random_order(graph, seed) for seed in range(4))]
    assert len({tuple(order) for order in orders}) == 5
    batch = image_batches(1)[0]  # held by the caller, during the step too
    for order in orders:
        values = program.read(tree_leaves((batch, {})))
        for place in program.frees:
            place.clear()
        runnable = executable(found, order)
        with Tracker(values) as tracker:
            outputs = runnable(values)
        program.store(outputs)
        del outputs
        measured = [(func, total) for func, total in tracker.rows if func.namespace != "profiler"]
        targets = [found.nodes[int(op)].target for op in order]
        seen = iter(measured)
        for target, predicted in zip(targets, held(graph, np.array(order)), strict=True):
            if isinstance(target, torch._ops.OpOverload):
                got = next(total for func, total in seen if func is target)
                assert got == predicted, target


def test_the_tracker_sees_what_is_freed_late() -> None:
    tracker = Tracker([])
    with tracker:
        first = torch.zeros(100)
        torch.ones(10)
        kept = first.view(10, 10)
        del first
        assert tracker.bytes == 400
        del kept
    assert tracker.bytes == 0
    assert [total for _, total in tracker.rows] == [400, 440, 400]


def test_peaks_differ_between_orders() -> None:
    graph = operators(residual_job().program()).graph
    peaks = {int(np.max(held(graph, np.array(random_order(graph, seed))))) for seed in range(4)}
    assert len(peaks) > 1
