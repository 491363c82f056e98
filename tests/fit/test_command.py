"""`memplan fit`: what it captures, what it prints and writes, how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.cli import fit as command
from memplan.cli import main
from memplan.recompute.solve import Solver
from memplan.types.device import find_profile
from memplan.types.plan import Plan
from memplan.types.plan_file import load_plan
from memplan.worker import captures
from memplan.worker.captures import Captured, NotYetError
from memplan.worker.pool import Workers
from memplan.worker.request import Question
from tests.fit.chain_job import MIB, ChainProgram, Greedy
from tests.schemas import read_answer

SOURCE = 'parser.add_argument("--batch-size", type=int, default=8)\n'


class FakeCapture:
    """Stands for the processes that capture; the job is the one of `chain_job`."""

    question: Question
    asked: list[ScriptTarget]
    weight = 8 * MIB

    def __init__(self, question: Question, workers: Workers, *, goes_on: bool) -> None:
        type(self).question, type(self).asked = question, []
        assert question.profile is not None
        self._job = ChainProgram(question.profile, weight=self.weight)

    def __call__(
        self,
        program: ScriptTarget,
        plan: Plan | None = None,
        *,
        quiet: bool = False,
        steps: int | None = None,
    ) -> Captured:
        assert quiet is bool(self.asked), "only the first capture is heard"
        self.asked.append(program)
        return self._job(program, plan)

    def ahead(
        self, program: ScriptTarget, plan: Plan | None = None, *, quiet: bool = True
    ) -> Captured:
        raise NotYetError


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(captures, "RankCapture", FakeCapture)
    monkeypatch.setattr(command, "machine_profile", lambda: None)
    monkeypatch.setattr(FakeCapture, "weight", 8 * MIB)
    solver = Greedy()  # a starved one finds nothing
    monkeypatch.setattr(Solver, "solve", solver.solve)
    monkeypatch.setattr(Solver, "least_peak", solver.least_peak)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SOURCE)


def fit(*words: str) -> int:
    return main(["fit", *words])


def test_a_plan_is_found_written_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "2600MiB", "-o", "job.plan", "train.py", "--lr", "0.1"]
    assert fit(*words) == 0
    lines, stages = (text.splitlines() for text in capsys.readouterr())
    assert stages[0] == "memplan: capturing train.py"
    assert stages[1].startswith("memplan: looking for a plan (capture 2, about ")
    assert all(" s left if this is enough)" in stage for stage in stages[1:])
    assert lines[0].startswith("fits with a plan: peak ") and lines[0].endswith(" % time")
    assert any(line.startswith("  recompute  blocks") for line in lines)
    assert lines[-1] == "next: memplan run --plan job.plan train.py --lr 0.1"
    plan = load_plan("job.plan")
    assert plan.recompute is not None and plan.recompute.groups
    assert plan.made_from.gpu == find_profile("2600MiB").name
    before = Path("job.plan").read_bytes()
    assert fit(*words) == 2
    assert "exists" in capsys.readouterr().err
    assert Path("job.plan").read_bytes() == before
    assert fit("-f", *words) == 0


def test_a_frontier_with_its_plans(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--json", "--gpu", "2600MiB", "--frontier", "--plans", "curve", "train.py"]
    assert fit(*words) == 0
    points = read_answer("fit", capsys.readouterr().out)["frontier"]
    assert [point["plan"] for point in points] == [f"curve/{n}.plan" for n in range(len(points))]
    for point in points:
        plan = load_plan(point["plan"])
        added = sum(part.added_seconds for part in (plan.recompute, plan.offload) if part)
        assert added == pytest.approx(point["added_seconds"])
    assert fit(*words) == 2, "they are not written over"
    assert "curve/0.plan exists" in capsys.readouterr().err
    Path("curve/0.plan").unlink()
    FakeCapture.asked = []
    assert fit(*words) == 2 and not FakeCapture.asked
    assert "curve/1.plan exists" in capsys.readouterr().err
    older = Path(f"curve/{len(points)}.plan")
    older.write_text("of a longer frontier")
    assert fit("-f", *words) == 0
    assert not older.exists() and Path(f"curve/{len(points) - 1}.plan").exists()


def test_json_says_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--json", "--gpu", "2600MiB", "-o", "job.plan", "train.py") == 0
    out = capsys.readouterr().out
    answer = read_answer("fit", out)
    assert answer["schema_version"] == 1 and answer["memplan_version"] and answer["torch_version"]
    assert answer["gpu"]["total_bytes"] == 2600 * MIB
    assert answer["fits"] is True and answer["before"]["fits"] is False
    assert answer["after"]["fits"] is True and answer["plan"] == "job.plan"
    assert answer["added_fraction"] > 0 and answer["attempts"] and answer["changes"] == []
    plan = load_plan("job.plan")
    settings = [lever["name"] for lever in answer["levers"] if lever["kind"] == "allocator"]
    assert settings == ([plan.alloc_conf] if plan.alloc_conf else [])


def test_what_fits_gets_an_empty_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--gpu", "24GiB", "-o", "job.plan", "train.py") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("peak ") and ": fits, " in lines[0]
    plan = load_plan("job.plan")
    assert plan.recompute is None and plan.alloc_conf == ""


def test_the_allocator_alone_may_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--gpu", "3180MiB", "-o", "job.plan", "train.py") == 0
    assert "expandable_segments:True" in capsys.readouterr().out
    assert len(FakeCapture.asked) == 1
    plan = load_plan("job.plan")
    assert plan.recompute is None and plan.alloc_conf == "expandable_segments:True"


def test_no_plan_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCapture, "weight", 2 * MIB)
    assert fit("--gpu", "1100MiB", "-o", "job.plan", "train.py") == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("does not fit 1100 MiB with any plan tried: a card of ")
    assert "nearest changes that fit" in lines
    change = next(line for line in lines if line.startswith("  --batch-size "))
    assert "(now 8)" in change
    value = change.split()[1]
    assert lines[-1] == (
        f"next: memplan fit --gpu 1100MiB -o job.plan train.py --batch-size {value}"
    )
    assert not Path("job.plan").exists()
    assert any("job.plan was not written" in line for line in lines)


def test_without_o_the_next_command_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--gpu", "2600MiB", "train.py") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "next: memplan fit --gpu 2600MiB -o job.plan train.py"


def test_options_reach_the_captures() -> None:
    words = ["--gpu", "24GiB", "--steps", "5", "--routing", "worst", "--allow-network"]
    words += ["--with", "apex", "--with=rules.py"]
    assert fit(*words, "--alloc-conf", "max_split_size_mb:64", "-m", "json.tool", "x") == 0
    assert FakeCapture.asked == [ScriptTarget("module", "json.tool", ("x",))]
    request = FakeCapture.question.request
    assert request.alloc_conf == "max_split_size_mb:64" and request.plan is None
    assert request.options == CaptureOptions(
        profile=find_profile("24GiB"),
        steps=5,
        routing="worst",
        allow_network=True,
        packages=("apex", "rules.py"),
    )


def test_a_plan_of_one_rank_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    launched = ("torchrun", "--nproc-per-node", "2", "train.py")
    assert fit("--gpu", "24GiB", "--json", "--rank", "0", *launched) == 0
    notes = read_answer("fit", capsys.readouterr().out)["notes"]
    assert any(note.startswith("The plan is made from rank 0 of 2") for note in notes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py"], "no card to fit"),
        (
            ["--gpu", "24GiB", "PYTORCH_ALLOC_CONF=x:1", "python", "train.py"],
            "PYTORCH_ALLOC_CONF=x:1 of the environment: unknown key 'x'",
        ),
        (["--gpu", "24GiB"], "no script given"),
        (["--gpu", "many", "train.py"], "unknown GPU 'many'"),
        (["--gpu", "24GiB", "tain.py"], "no script tain.py"),
        (["--gpu", "24GiB", "--steps", "0", "train.py"], "a plan needs a training step"),
        (["--gpu", "24GiB", "--at-most", "5", "train.py"], "'5' is not a percentage"),
        (["--gpu", "24GiB", "--at-most=-1%", "train.py"], "'-1%' is not a percentage"),
        (["--gpu", "24GiB", "--plans", "x", "train.py"], "--plans without --frontier"),
        (["--gpu", "24GiB", "-f", "--frontier", "--plans", "train.py", "train.py"], "is a file"),
        (["--gpu", "24GiB", "--alloc-conf", "x:1", "train.py"], "x"),
        (["--gpu", "24GiB", "-o", "no/job.plan", "train.py"], "does not exist"),
        (["--gpu", "24GiB", "-f", "-o", "train.py", "train.py"], "is what this command reads"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeCapture.asked = []
    assert fit(*words) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and "  try: " in err
    assert not FakeCapture.asked
    assert Path("train.py").read_text() == SOURCE


# The real children


def _default_signals() -> None:
    """Tests that run in the background inherit signals that are ignored."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def memplan(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process, killed where the block ends by an error: Popen itself would wait for it."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-m", "memplan", *words],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_default_signals,
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def test_a_failing_capture_says_why_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nraise ValueError('no data here')\n")
    with memplan(tmp_path, "fit", "--gpu", "l4", "-o", "job.plan", "train.py") as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 4
    assert out == "" and err.count("no data here") == 1 and "Traceback" not in err
    assert not list((tmp_path / "scratch").iterdir())
    assert not (tmp_path / "job.plan").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time, torch\ntorch.ones(1).cuda()\nprint(os.getpid(), flush=True)\n"
        "while True:\n    time.sleep(0.1)\n"
    )
    with memplan(tmp_path, "fit", "--gpu", "l4", "train.py") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "memplan: capturing train.py\n"
        script = int(process.stderr.readline())
        process.send_signal(number)
        assert process.wait(300) == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
        said = {signal.SIGTERM: "ended by SIGTERM", signal.SIGINT: "interrupted"}[number]
        assert process.stderr.read() == f"memplan: {said}\n"
    assert not list((tmp_path / "scratch").iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(script, 0)
