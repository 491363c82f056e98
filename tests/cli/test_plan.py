"""`memplan plan`: a trace or a script in, a plan file out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.cli import main
from memplan.types.allocation import read_requests
from memplan.types.plan_file import load_plan
from memplan.types.trace_file import save_trace
from tests.layout.jobs import JobMaker, training

SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 8))
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    model(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_from_a_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace, path = tmp_path / "job.trace", tmp_path / "job.plan"
    save_trace(training(), trace)
    assert main(["plan", "-o", str(path), "--json", "--from-trace", str(trace)]) == 0
    answer = json.loads(capfd.readouterr().out)
    part = load_plan(path).allocation
    assert part is not None and part.arena_bytes == answer["arena_bytes"] == answer["load_bytes"]
    assert answer["optimal"] is True and answer["planned"] == answer["requests"] == part.requests
    assert answer["schema_version"] == 1 and answer["torch_version"] == "2.13.0"
    assert main(["plan", "-o", str(path), "--from-trace", str(trace)]) == 2
    assert "-f" in capfd.readouterr().err
    assert main(["plan", "-f", "-o", str(path), "--from-trace", str(trace)]) == 0
    assert capfd.readouterr().out.startswith("arena 2 MiB: the least possible; 38 of 38")


def test_from_a_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, path = tmp_path / "train.py", tmp_path / "job.plan"
    script.write_text(SCRIPT)
    assert main(["plan", "-o", str(path), "--gpu", "rtx4090", str(script)]) == 0
    out = capfd.readouterr().out
    assert out.startswith("arena ") and f"memplan run --plan {path}" in out
    plan = load_plan(path)
    assert plan.made_from.script == str(script) and plan.allocation is not None
    requests = read_requests(plan.allocation)
    assert (requests.offset >= 0).all() and 8 * 512 * 4 in requests.bytes


def test_bad_input(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = JobMaker()
    job.alloc("weight", 100)
    stepless = tmp_path / "stepless.trace"
    save_trace(job.trace(), stepless)
    path = str(tmp_path / "job.plan")
    for words, code, says in (
        (["-o", path, "--from-trace", str(stepless)], 4, "no step to plan"),
        (["-o", path, "--from-trace", str(tmp_path / "none")], 2, "does not exist"),
        (["-o", path, "--from-trace", str(stepless), "train.py"], 2, "one of the two"),
        (["-o", path, "--from-trace", str(Path(__file__))], 2, "not a memplan trace"),
        (["--from-trace", str(stepless)], 2, "-o"),
        (["-o", path, "--steps", "1", str(Path(__file__))], 2, "steps to compare"),
    ):
        assert main(["plan", *words]) == code
        out, err = capfd.readouterr()
        assert out == "" and says in err and "Traceback" not in err
    assert not Path(path).exists()
