"""The lever of frozen weights on scripts that are captured, as a user would type it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memplan.cli import main
from memplan.fit.frozen import frozen_bytes
from memplan.phases import plain_peak, step_graph
from memplan.recompute.evaluate import evaluate
from memplan.recompute.selection import Selection, op_output, to_part
from memplan.runtime.in_effect import plan_in_effect
from memplan.types.plan import FrozenPart, OrderPart, Plan, RecomputePart
from memplan.types.plan_file import load_plan, save_plan
from memplan.types.trace import Phase, Role, Trace
from memplan.types.trace_file import load_trace
from tests import warm
from tests.capturing.jobs import record
from tests.estimation.jobs import MIB, training_job

ADAPTED = """
import sys
import torch
from torch import nn

class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(2048, 2048, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(2048, 8, bias=False), nn.Linear(8, 2048, bias=False)

    def forward(self, x):
        return torch.relu(self.base(x) + self.up(self.down(x)))

model = nn.Sequential(*(Adapted() for _ in range(16))).cuda()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(ADAPTED)


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = main([*words, "train.py"])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["fits"] else 3)
    return answer


def test_frozen_weights_go_to_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    card = ("--json", "--gpu", "880MiB")
    answer = answered(capsys, "fit", *card, "-f", "-o", "job.plan")
    [lever] = [one for one in answer["levers"] if one["kind"] == "frozen"]
    assert answer["fits"] and lever["numbers"] == "exact" and lever["bound"] == "link"
    part = load_plan(Path("job.plan")).frozen
    assert part is not None and part.host_bytes == answer["host_bytes"] > 0
    again = answered(capsys, "estimate", *card, "--plan", "job.plan")
    assert again["allocated_peak_bytes"] == part.peak_bytes and again["fits"]


def test_weights_whose_copies_hide_come_before_recomputation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("train.py").write_text(ADAPTED.replace("randn(64,", "randn(16384,"))
    plain = answered(capsys, "estimate", "--json", "--gpu", "24GiB")
    card = f"{plain['high_bytes'] // 2**20 - 150}MiB"
    answer = answered(
        capsys, "fit", "--json", "--gpu", card, "--alloc-conf", "max_split_size_mb:64"
    )
    kinds = {one["kind"] for one in answer["levers"]}
    assert answer["fits"] and {"frozen"} <= kinds <= {"frozen", "allocator"}
    assert answer["captures"] == 2 and "recompute" not in answer["levers_tried"]
    assert answer["added_fraction"] < 0.01


def test_a_weight_whose_gradient_has_another_shape_is_not_frozen() -> None:
    """As under FSDP2, where gradients of a layer lie in one storage."""
    trace = training_job()
    weights = np.flatnonzero(trace.storages.role == Role.PARAMETER)
    updates = trace.ops.phase == Phase.OPTIMIZER
    starts = np.cumsum([0, *(len(weights) * updates)])
    ops = replace(trace.ops, writes=np.tile(weights, updates.sum()), writes_start=starts)
    assert frozen_bytes(replace(trace, ops=ops)) == []
    assert frozen_bytes(trace) == [64 * MIB] * 2  # none that writes them


def test_a_weight_that_is_updated_in_backward_is_not_frozen() -> None:
    Path("train.py").write_text(ADAPTED.replace(".requires_grad_(False)", ""))
    order = OrderPart(parameters=48, gradient_bytes=0, from_first=True)
    save_plan(Plan(memplan_version="0", order=order), Path("job.plan"))
    words = ("estimate", "--gpu", "24GiB", "--plan", "job.plan", "-o", "job.trace", "train.py")
    done = warm.run(Path.cwd(), "-m", "memplan", *words)
    assert done.returncode == 0, done.stderr
    assert frozen_bytes(load_trace(Path("job.trace"))) == []


def test_rows_of_a_frozen_embedding_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recomputation reads them on the host, as the forward does."""
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")

    def job() -> None:
        rows = nn.Embedding(8192, 512).requires_grad_(False)
        model = nn.Sequential(rows, nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()
        optimizer = torch.optim.SGD(model[1:].parameters(), lr=1e-3)
        for _ in range(3):
            model(torch.zeros(4096, dtype=torch.long, device="cuda")).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def captured(recompute: RecomputePart | None = None) -> Trace:
        said: list[str] = []
        plan = Plan(frozen=FrozenPart(share=1.0, ahead_bytes=0), recompute=recompute)
        with plan_in_effect(plan, [], lambda *words: said.extend(words)):
            trace = record(job)
        assert not said
        return trace

    graph = step_graph(captured())
    selection = Selection((frozenset(np.flatnonzero(graph.values.droppable).tolist()),))
    names = [op_output(graph, value).op for value in selection.groups[0]]
    assert "aten.embedding.default" in names
    part = to_part(graph, selection, budget_bytes=0, peak_bytes=0, added_seconds=0.0)
    assert plain_peak(step_graph(captured(part))) == evaluate(graph, selection).peak_bytes
