"""What a step graph says against what a job does under a plan that drops all that can be dropped:
the bytes that are there when backward begins, and the peak, both to the byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from memplan.phases import step_graph
from memplan.phases.passes import alive_after, step_passes
from memplan.recompute.evaluate import evaluate
from memplan.recompute.selection import Selection, to_part
from memplan.runtime.apply import AppliedEverywhere
from memplan.types.plan import RecomputePart
from memplan.types.step_graph import StepGraph
from memplan.types.trace import Trace
from tests.capturing.distributed.ranks import capture, join
from tests.capturing.jobs import record
from tests.phases.step_jobs import JOBS, Two, training

ROWS_A_GROUP = 25


@pytest.fixture(autouse=True)
def one_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are replayed have a workspace of cuBLASLt in backward's thread, too."""
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")


class Gated(nn.Module):
    """Nodes of several operators, values that two nodes save, and a norm that is one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)
        self.norm = nn.RMSNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return y * torch.sigmoid(y) + nn.functional.softplus(y) ** 3


class Expert(nn.Module):
    """`index_add_` saves its source and looks at the shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(0, len(x), 2, device=x.device)
        y = self.layer(x[rows]).tanh()
        return torch.zeros_like(x).index_add_(0, rows, y * y.sigmoid()).sin()


SEVERAL = {
    **{name: JOBS[name] for name in ("mlp", "autocast", "residual", "attention", "accumulation")},
    "gated": training(lambda: nn.Sequential(Gated(), Gated(), Gated()), (64, 64)),
    "twice": training(Two, (32, 64)),
    "expert": training(Expert, (32, 64)),
}


@pytest.mark.parametrize("job", SEVERAL.values(), ids=SEVERAL.keys())
def test_what_is_dropped_is_gone_and_the_peak_as_told(job: Callable[[], None]) -> None:
    plain = record(job)
    graph = step_graph(plain)
    selection = _everything(graph)
    part = to_part(graph, selection, budget_bytes=0, peak_bytes=0, added_seconds=0.0)
    notes: list[str] = []

    def applied() -> None:
        with AppliedEverywhere(part, notes.append):
            job()

    planned = record(applied)
    dropped = int(graph.values.bytes[graph.values.droppable].sum())
    assert dropped > 0 and not notes
    assert _when_backward_begins(planned) == _when_backward_begins(plain) - dropped
    assert _peak(planned) == evaluate(graph, selection).peak_bytes


class Normed(nn.Module):
    """A norm with its sums in float32: backward saves a copy of a block's input, not the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x + self.down(nn.functional.gelu(self.up(y)))


def test_replays_begin_behind_weights_that_fsdp_has_released() -> None:
    part: RecomputePart | None = None

    def job() -> None:
        join()
        model = nn.Sequential(*(Normed() for _ in range(3))).to("cuda", torch.bfloat16)
        for block in model:
            fully_shard(block)
        fully_shard(model)
        with AppliedEverywhere(part) if part else nullcontext():
            training(lambda: model, (32, 64), dtype=torch.bfloat16)()

    plain = capture(job)
    graph = step_graph(plain)
    outputs = sorted(graph.between)
    assert [graph.ops.name[row] for row in graph.values.alloc[outputs]] == ["aten.add.Tensor"] * 2
    everything = Selection((frozenset(np.flatnonzero(graph.values.droppable).tolist()),))
    part = to_part(graph, everything, budget_bytes=0, peak_bytes=0, added_seconds=0.0)
    planned = capture(job)
    more = int(graph.values.bytes[outputs].sum() - graph.values.bytes[graph.values.droppable].sum())
    assert _when_backward_begins(planned) == _when_backward_begins(plain) + more
    assert _peak(planned) <= evaluate(graph, everything).peak_bytes
    # One group across all blocks: each operator is replayed once, when its block has its weights.
    assert step_graph(planned).ops.name.count("aten.rsqrt.default") == 2 * 3


def _everything(graph: StepGraph) -> Selection:
    groups: dict[tuple[int, int], set[int]] = {}
    for value in np.flatnonzero(graph.values.droppable).tolist():
        row = int(graph.values.alloc[value])
        key = int(graph.ops.call[row]), row // ROWS_A_GROUP
        groups.setdefault(key, set()).add(value)
    return Selection(tuple(frozenset(group) for group in groups.values()))


def _when_backward_begins(trace: Trace) -> int:
    """Requested bytes alive then, in the pass that has most."""
    alive = alive_after(trace)
    return max(int(alive[trace.ops.event[p.backward]]) for p in step_passes(trace).passes)


def _peak(trace: Trace) -> int:
    found = step_passes(trace)
    return int(alive_after(trace)[found.start : found.stop + 1].max())
