"""`memplan plan`: a trace or a script in, a plan file out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest

from memplan.cli import main
from memplan.types.allocation import read_requests
from memplan.types.plan_file import load_plan
from memplan.types.trace import Communicator
from memplan.types.trace_file import save_trace
from memplan.worker import captures
from tests.layout.jobs import JobMaker, training
from tests.schemas import read_answer

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
    answer = read_answer("plan", capfd.readouterr().out)
    part = load_plan(path).allocation
    assert part is not None and part.arena_bytes == answer["arena_bytes"] == answer["load_bytes"]
    assert answer["optimal"] is True and answer["planned"] == answer["requests"] == part.requests
    assert answer["schema_version"] == 1 and answer["torch_version"] == "2.13.0"
    assert main(["plan", "-o", str(path), "--from-trace", str(trace)]) == 2
    assert "-f" in capfd.readouterr().err
    assert main(["plan", "-f", "-o", str(path), "--from-trace", str(trace)]) == 0
    out = capfd.readouterr().out
    assert out.startswith("arena 2 MiB: the least possible; 38 of 38")
    assert out.endswith(f"\nnext: memplan run --plan {path} train.py\n")


ONE_OF_TWO = Communicator(ranks=2, local_ranks=2, nodes=1)


@pytest.mark.parametrize(
    ("command", "communicators", "following"),
    [
        (
            ["pkg.train", "--name", "a b"],
            [],
            "memplan run --plan job.plan -m pkg.train --name 'a b'",
        ),
        (["train.py"], [ONE_OF_TWO], "torchrun … -m memplan run --plan job.plan train.py"),
        ([], [], ""),
    ],
)
def test_what_follows_is_told_as_far_as_a_trace_knows(
    command: list[str],
    communicators: list[Communicator],
    following: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = training()
    meta = msgspec.structs.replace(trace.meta, command=command, communicators=communicators)
    save_trace(dataclasses.replace(trace, meta=meta), Path("job.trace"))
    assert main(["plan", "-o", "job.plan", "--from-trace", "job.trace"]) == 0
    _, _, said = capfd.readouterr().out.partition("next: ")
    assert said.rstrip("\n") == following


def test_the_planned_one_of_several_devices_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = training()
    large = trace.events.bytes >= 500 << 10  # the output alone
    storage = trace.events.storage
    device = np.where(np.isin(storage, storage[large]), 0, 1).astype(np.int16)
    events = dataclasses.replace(trace.events, device=device)
    save_trace(dataclasses.replace(trace, events=events), Path("job.trace"))
    assert main(["plan", "-o", "job.plan", "--from-trace", "job.trace"]) == 0
    said = "\nfor cuda:1, which is asked most; cuda:0: PyTorch's own allocator\n"
    assert said in capfd.readouterr().out
    assert main(["plan", "-f", "-o", "job.plan", "--json", "--from-trace", "job.trace"]) == 0
    answer = read_answer("plan", capfd.readouterr().out)
    part = load_plan(Path("job.plan")).allocation
    assert part is not None and part.device == answer["device"] == 1
    assert 500 << 10 not in read_requests(part).bytes


class Captures:
    """Stands for the process that captures a job."""

    def __init__(self, *_args: object) -> None:
        self.trace = training()

    def __call__(self, *_args: object) -> Captures:
        return self


def test_a_plan_goes_below_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(captures, "RankCapture", Captures)
    Path("train.py").touch()
    words = ["plan", "-o", "job.plan", "torchrun", "--nproc-per-node", "2", "train.py", "--x"]
    assert main(words) == 0
    below = "torchrun --nproc-per-node 2 -m memplan run --plan job.plan train.py --x"
    assert capfd.readouterr().out.endswith(f"\nnext: {below}\n")


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
