"""`memplan run` with the planned allocator: its options, files and the line at the end. There is no
GPU here, so the allocator is one that keeps books alone."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memplan.cli.app import main
from memplan.runtime.planned import install, pluggable
from memplan.runtime.planned.files import RunFiles
from memplan.runtime.planned.install import PlannedRun
from memplan.types.plan import Fingerprint, Plan
from memplan.types.plan_file import load_plan, save_plan
from memplan.types.trace_file import load_trace
from tests import warm
from tests.runtime.planned.fake_library import FakeLibrary, StorageWatch
from tests.schemas import read_answer

JOB = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 16))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if "fail" in sys.argv:
    raise ValueError("on purpose")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job in the current folder, and a process whose CUDA memory comes from the fake library."""
    (tmp_path / "train.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(pluggable, "why_not", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    library: Any = FakeLibrary()
    monkeypatch.setattr(install._Process, "library", library)
    monkeypatch.setattr(install._Process, "pluggable_used", True)
    return tmp_path


def run(*words: str) -> int:
    library: Any = install._Process.library
    with StorageWatch(library):
        return main(["run", *words])


def test_record_plan_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--record", "job.trace", "train.py", "--lr", "1") == 0
    said = capsys.readouterr().err
    assert "wrote job.trace; next: memplan plan -o job.plan --from-trace job.trace" in said
    trace = load_trace(folder / "job.trace")
    assert trace.meta.optimizer_steps == 6 and trace.meta.command == ["train.py", "--lr", "1"]
    assert trace.meta.method == "observed" and "Sequential" in trace.strings

    assert main(["plan", "-o", "job.plan", "--from-trace", "job.trace"]) == 0
    assert load_plan(folder / "job.plan").made_from.command == ["train.py", "--lr", "1"]
    capsys.readouterr()
    assert run("--plan", "job.plan", "--stats", "job.json", "train.py", "--lr", "1") == 0
    said = capsys.readouterr().err
    assert said.startswith("memplan: peak reserved ") and said.count("\n") == 1
    assert "with the plan, " in said and "simulated from the first" in said
    stats = read_answer("run", (folder / "job.json").read_text())
    assert stats["plan"] == "job.plan" and stats["steps"] == 6
    assert stats["hit_rate"] >= 0.95
    assert f"hit rate {stats['hit_rate']:.1%}" in said


def test_the_script_fails_and_the_outcome_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--stats", "job.json", "train.py", "fail") == 1
    said = capsys.readouterr().err
    assert "ValueError: on purpose" in said and "memplan: peak reserved" in said
    assert read_answer("run", (folder / "job.json").read_text())["steps"] == 6


def test_ranks_have_files_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run("--record", "job.trace", "train.py") == 0
    assert (folder / "job.rank1.trace").is_file() and not (folder / "job.trace").exists()
    assert "memplan (rank 1): peak reserved" in capsys.readouterr().err
    assert main(["plan", "-o", "job.rank1.plan", "--from-trace", "job.rank1.trace"]) == 0
    assert run("--plan", "job.plan", "--stats", "job.json", "train.py") == 0
    assert read_answer("run", (folder / "job.rank1.json").read_text())["plan"] == "job.rank1.plan"


def test_a_plan_for_other_arguments_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--record", "job.trace", "train.py", "--batch", "8")
    main(["plan", "-o", "job.plan", "--from-trace", "job.trace"])
    capsys.readouterr()
    assert run("--plan", "job.plan", "train.py", "--batch", "16") == 0
    assert "made for train.py --batch 8: where sizes differ, requests go" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--record", "there.trace", "train.py"], "there.trace exists"),
        (["--stats", "none/job.json", "train.py"], "does not exist"),
        (["--plan", "broken.plan", "train.py"], "not a plan of memplan"),
        (["--plan", "odd.plan", "train.py"], "odd.plan: allocator settings: unknown key 'odd'"),
        (["--record", "job.json", "--stats", "job.json", "train.py"], "name the same file"),
        (["-f", "--stats", "train.py", "train.py"], "is what this command reads"),
    ],
)
def test_what_cannot_be_is_said_before_the_script_begins(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    (folder / "there.trace").write_bytes(b"")
    (folder / "broken.plan").write_text("{}")
    save_plan(Plan(memplan_version="0", alloc_conf="odd:1"), folder / "odd.plan")
    assert run(*words) == 125
    assert what in capsys.readouterr().err


def test_what_others_have_written_meanwhile_stays(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(JOB + "\nopen('job.trace', 'x'), open('job.json', 'x')")
    assert run("--record", "job.trace", "--stats", "job.json", "train.py") == 0
    said = capsys.readouterr().err
    assert "job.json exists by now: writing job.2.json" in said
    assert "wrote job.2.trace; next: memplan plan -o job.2.plan" in said
    assert load_trace(folder / "job.2.trace").meta.optimizer_steps == 6
    assert not (folder / "job.trace").read_bytes() and not (folder / "job.json").read_bytes()


def test_one_file_that_cannot_be_written_does_not_cost_the_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "out").mkdir()
    (folder / "train.py").write_text(JOB + "\nimport os\nos.rmdir('out')\nsys.stderr.close()")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert run("--record", "job.trace", "--stats", "out/job.json", "train.py") == 0
    assert load_trace(folder / "job.trace").meta.optimizer_steps == 6


def test_a_child_that_the_script_forks_writes_nothing(folder: Path) -> None:
    files = RunFiles(pytest.fail, stats=folder / "job.json", process=-1)
    files.finish(PlannedRun())
    assert not (folder / "job.json").exists()


def test_a_job_without_device_memory_has_no_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text("")
    assert run("train.py") == 0
    assert capsys.readouterr().err == ""


def test_recording_beside_a_plan_of_allocation_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--record", "job.trace", "train.py")
    main(["plan", "-o", "job.plan", "--from-trace", "job.trace"])
    assert run("--plan", "job.plan", "--record", "other.trace", "train.py") == 125
    assert "--record beside a plan" in capsys.readouterr().err


def test_expandable_segments_of_the_user_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install._Process, "library", None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert main(["run", "train.py"]) == 125
    said = capsys.readouterr().err
    assert "expandable_segments and the planned allocator exclude" in said and "try: unset" in said


def test_a_plan_of_another_job_is_named_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(pluggable, "why_not", lambda: "there is no GPU")
    plan = Plan(made_from=Fingerprint(command=["other.py"]))
    install.start(plan, command=["train.py"], say=said.append)
    assert any("the plan was made for other.py" in text for text in said)


def test_without_a_gpu_a_note_and_the_ordinary_allocator(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    words = ["--record", "job.trace", "--stats", "job.json", "train.py"]
    done = warm.memplan(tmp_path, "run", *words)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "PyTorch's ordinary allocator serves the job" in done.stderr
    assert "nothing was recorded: job.trace is not written" in done.stderr
    assert not (tmp_path / "job.trace").exists()
    stats = read_answer("run", (tmp_path / "job.json").read_text())
    assert stats["devices"] == stats["plans"] == [] and stats["steps"] is None
    assert stats["early_updates"] is None and "ordinary allocator" in stats["notes"][0]
