"""The lever of activation offload on scripts that are captured, as a user would type it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.types.plan_file import load_plan

SLOW_LAYERS = """
import torch
from torch import nn

torch.manual_seed(0)
layers = [part for _ in range(6) for part in (nn.Linear(4096, 4096, bias=False), nn.ReLU())]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(16384, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
"""
"""A product takes ten times as long as copying what it saves: recomputing is dear, moving free."""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SLOW_LAYERS)


def fit(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = main(["fit", "--json", "--gpu", "3500MiB", "-f", "-o", "job.plan", *words, "train.py"])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["fits"] else 3)
    return answer


def test_values_go_to_the_host_where_that_is_cheaper(capsys: pytest.CaptureFixture[str]) -> None:
    answer = fit(capsys)
    [lever] = [one for one in answer["levers"] if one["kind"] == "offload"]
    assert answer["fits"] and answer["added_fraction"] < 0.01
    assert lever["values"] >= 2 and lever["numbers"] == "exact"
    part = load_plan(Path("job.plan")).offload
    assert part is not None and len(part.values) == lever["values"]
    assert part.host_bytes == answer["host_bytes"] >= lever["saved_bytes"] > 0
    assert part.peak_bytes == answer["after"]["allocated_peak_bytes"]
    attempt = answer["attempts"][-1]
    assert attempt["requested_bytes"] == pytest.approx(attempt["planned_bytes"], rel=0.02)


def test_the_host_s_memory_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    answer = fit(capsys, "--host-memory", "0")
    assert answer["host_bytes"] == 0
    assert {lever["kind"] for lever in answer["levers"]}.isdisjoint({"offload", "state"})
    assert answer["added_fraction"] > 0.02
