"""`memplan sweep`: a command and a grid in, a ranking out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from memplan.cli import main
from memplan.fit import options
from memplan.fit.answer import Fit
from memplan.sweep.execute import Ended
from memplan.types.errors import UsageError
from tests.placement.answers import answer_of
from tests.schemas import read_answer
from tests.sweep.executors import Recorded, Waiting

_SCRIPT = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("-H", "--heads", type=int, default=4)
options = parser.parse_args()
"""
_TRAINING = """
if options.heads == 3:
    raise ValueError("64 is no multiple of 3")
if options.heads == 9:
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
if options.heads == 10:
    raise MemoryError
if options.heads == 11:
    raise SystemExit(2)
layer = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(layer.parameters())
for _ in range(20):
    layer(torch.randn(options.batch_size, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path, no_settings: None) -> str:
    path = tmp_path / "train.py"
    path.write_text(_SCRIPT + _TRAINING)
    return str(path)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    executor = Recorded("7")
    monkeypatch.setattr("memplan.cli.sweep._executor", lambda args: executor)
    return executor


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    executor = Waiting()
    monkeypatch.setattr("memplan.cli.sweep._executor", lambda args: executor)
    return executor


def _json(words: list[str], capfd: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert main(["sweep", "--json", *words]) == code
    return read_answer("sweep", capfd.readouterr().out)


def test_every_combination_is_asked_for_once(
    script: str, recorded: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpu", "h100,a100-80gb", "--vary", "batch-size=4,8", "--vary", "nproc-per-node=1,2"]
    found = _json([*words, "torchrun", "--nnodes", "1", script, "--heads", "4"], capfd)
    assert len(found["rows"]) == 8 and {row["status"] for row in found["rows"]} == {"fits"}
    row = next(row for row in found["rows"] if row["values"]["nproc-per-node"] == "2")
    assert row["command"][:3] == ["torchrun", "--nproc-per-node", "2"] and row["gpus"] == 2
    assert row["samples_per_step"] == 2 * int(row["values"]["batch-size"])
    # Two ranks of the larger jobs, one of the others.
    assert found["captures"] == len(recorded.asked) == 2 * 2 * (1 + 2)
    assert len({request.key() for request in recorded.asked}) == 12


def test_equal_captures_are_made_once(
    script: str, recorded: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    """torchrun's restarts change nothing that a process sees but one variable; log folders do not
    even that."""
    words = ["--gpu", "h100", "--vary", "log-dir=a,b,c", "torchrun", script]
    found = _json(words, capfd)
    assert len(found["rows"]) == 3 and found["captures"] == len(recorded.asked) == 1


def test_what_is_kept_is_not_asked_for_again(
    script: str,
    recorded: Recorded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["--gpu", "h100", "-o", str(tmp_path / "kept"), "--vary"]
    first = _json([*words, "heads=4,7", script], capfd)
    assert [row["status"] for row in first["rows"]] == ["fits", "impossible"]
    assert first["rows"][1]["reason"] == "the script raised" and first["kept"] == 0
    again = _json([*words, "heads=4,7,8", script], capfd)
    assert again["kept"] == 2 and again["captures"] == 1 and len(recorded.asked) == 3
    assert main(["place", "--format", "json", first["rows"][0]["answer"]]) == 0
    assert json.loads(capfd.readouterr().out)["fits"]
    with monkeypatch.context() as upgraded:
        upgraded.setattr("memplan.sweep.run._torch_version", lambda: "99.0")
        assert _json([*words, "heads=4", script], capfd)["kept"] == 0
    Path(script).write_text(_SCRIPT + "# changed\n")
    assert _json([*words, "heads=4", script], capfd)["kept"] == 0


def test_a_damaged_answer_is_named(
    script: str, recorded: Recorded, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpu", "h100", "-o", str(tmp_path / "kept"), "--vary", "heads=4", script]
    path = Path(_json(words, capfd)["rows"][0]["answer"])
    path.write_text("{}")
    assert main(["sweep", *words]) == 2
    assert f"{path} is not an answer of a sweep" in capfd.readouterr().err
    path.unlink()
    path.mkdir()
    assert main(["sweep", *words]) == 2
    assert f"{path} cannot be read: Is a directory" in capfd.readouterr().err


def test_a_sweep_ends_where_its_answers_cannot_be_kept(
    script: str,
    waiting: Waiting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What else runs is ended, and nothing more begins."""
    full = Mock(side_effect=UsageError("no space left on device"))
    monkeypatch.setattr("memplan.sweep.store.write_file", full)
    words = ["--gpu", "h100", "-o", str(tmp_path / "kept"), "--vary", "heads=1,2,4"]
    assert main(["sweep", *words, script]) == 2
    assert "no space left on device" in capfd.readouterr().err
    assert waiting.stopped.is_set() and len(waiting.asked) == 1


def test_a_job_that_runs_forward_only(
    script: str, recorded: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    _json(["--gpu", "h100", "--steps", "0", "--vary", "heads=4", script], capfd)
    assert [request.options.steps for request in recorded.asked] == [0]


def test_a_launcher_that_refuses_is_a_row(
    script: str, recorded: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    found = _json(["--gpu", "h100", "--vary", "nproc-per-node=1,0", "torchrun", script], capfd)
    assert [row["status"] for row in found["rows"]] == ["fits", "impossible"]
    assert "--nproc-per-node '0' is not a whole number" in found["rows"][1]["reason"]


def test_an_option_of_a_launcher_under_another_name(
    script: str, recorded: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last value counts: one put in front of `-n 8` would change nothing."""
    for given, name in (("-n", "ntasks"), ("--ntasks", "n")):
        words = ["--gpu", "h100", "--rank", "0", "--vary", f"{name}=1,2"]
        rows = _json([*words, "srun", given, "8", "python", script], capfd)["rows"]
        assert sorted((row["command"][1:3], row["gpus"]) for row in rows) == [
            ([given, "1"], 1),
            ([given, "2"], 2),
        ]
    assert main(["sweep", "--gpu", "h100", "--vary", "ntasks=2", "srun", "-n8", script]) == 2
    assert "--vary ntasks: srun has it under another spelling" in capfd.readouterr().err


def test_the_first_value_may_be_one_that_a_launcher_refuses(
    script: str, recorded: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    found = _json(["--gpu", "h100", "--vary", "nproc-per-node=0,1", "torchrun", script], capfd)
    assert [row["status"] for row in found["rows"]] == ["fits", "impossible"]


def test_ctrl_c_keeps_and_prints_what_is_done(
    script: str,
    waiting: Waiting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def as_completed(futures: Any) -> Any:
        yield next(future for future in iter(futures) if future.result())
        raise KeyboardInterrupt

    monkeypatch.setattr("memplan.sweep.run.as_completed", as_completed)
    folder = tmp_path / "kept"
    found = _json(["--gpu", "h100", "-o", str(folder), "--vary", "heads=2,4,8", script], capfd)
    assert not found["complete"] and waiting.stopped.is_set()
    assert [row["status"] for row in found["rows"]] == ["fits", "not_done", "not_done"]
    assert len(list((folder / "answers").iterdir())) == 1


class _Fitting(Recorded):
    """Finds a plan for the smaller of two cards, and none for the smallest."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[list[str]] = []

    def fit(self, words: Sequence[str], output: Path) -> Ended:
        self.words.append(list(words))
        card = words[words.index("--gpu") + 1]
        answer = answer_of(card, 60 << 20)
        assert answer.gpu is not None
        fits = card == "70MiB"
        found = Fit(
            memplan_version="0",
            torch_version="0",
            gpu=answer.gpu,
            fits=fits,
            before=answer,
            after=answer,
            least_card_bytes=None if fits else (90 << 20) + 1,
            step_seconds=None,
            added_seconds=0.5,
            added_fraction=0.5,
            levers=[],
            changes=[],
            tried=[],
            attempts=[],
            plan=None,
            seconds=1.0,
            notes=[],
        )
        output.write_bytes(b"a plan")
        return Ended(0 if fits else 3, msgspec.json.encode(found), "")


def test_those_that_do_not_fit_are_fitted(
    script: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    executor = _Fitting()
    monkeypatch.setattr("memplan.cli.sweep._executor", lambda args: executor)
    words = ["--fit", "--steps", "4", "--gpu", "h100,70MiB,66MiB", "-o", str(tmp_path / "kept")]
    found = _json([*words, "--vary", "heads=2", "torchrun", "--nproc-per-node", "2", script], capfd)
    rows = {row["gpu"]: row for row in found["rows"]}
    assert {gpu: row["status"] for gpu, row in rows.items()} == {
        "h100": "fits",
        "70MiB": "fits_with_plan",
        "66MiB": "too_large",
    }
    planned = rows["70MiB"]
    assert planned["high_bytes"] == 60 << 20 and planned["added_fraction"] == 0.5
    assert Path(planned["plan"]).read_bytes() == b"a plan"
    assert rows["66MiB"]["reason"] == "no plan makes it fit; a card of 91 MiB would do"
    assert rows["66MiB"]["plan"] is None
    asked = len(executor.words)
    moved = (tmp_path / "kept").rename(tmp_path / "moved")
    words[-1] = str(moved)
    job = ["--vary", "heads=2", "torchrun", "--nproc-per-node", "2", script]
    again = {row["gpu"]: row for row in _json([*words, *job], capfd)["rows"]}
    plan = Path(again["70MiB"]["plan"])
    assert plan.parent == moved / "plans" and len(executor.words) == asked
    plan.unlink()
    _json([*words, *job], capfd)
    assert plan.read_bytes() == b"a plan" and len(executor.words) == asked + 1
    ours = executor.words[0]
    assert ours[:3] == ["memplan", "fit", "--json"] and ours[ours.index("--steps") + 1] == "4"
    assert ours[ours.index("--rank") + 1] == "0"
    assert ours[-6:] == ["torchrun", "--nproc-per-node", "2", script, "--heads", "2"]


def test_bad_input(script: str, recorded: Recorded, capfd: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--vary", "bath-size=1,2"], "--vary bath-size: no such option"),
        (["--vary", "heads=1", "--most", "1", "--vary", "batch-size=1,2"], "has 2 combinations"),
        (["--price", "l4=1/h", "--samples", "5"], "l4=1: no such --gpu"),
        (["--json", "--csv"], "contradict"),
        (["--fit", "--steps", "0"], "a plan needs a training step"),
        (["--steps", "-1"], "'-1' is not a number of steps"),
        (["-o", script], "is no folder"),
        (["-o", "/proc/none"], "/proc/none cannot be made"),
        (["--vary", "heads=1", "--vary", "H=2"], "heads and --vary H are the same option"),
    ):
        assert main(["sweep", "--gpu", "h100", *words, script]) == 2, words
        assert said in capfd.readouterr().err
    assert main(["sweep", "--vary", "heads=1", script]) == 2
    assert "--gpu" in capfd.readouterr().err
    assert not recorded.asked


def test_an_option_may_be_named_with_its_dashes(
    script: str, recorded: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    found = _json(["--gpu", "h100", "--vary", "--heads=2,4", "--", script], capfd)
    assert [row["command"] for row in found["rows"]] == [
        [script, "--heads", "2"],
        [script, "--heads", "4"],
    ]


def test_the_source_is_parsed_once_for_all_combinations(
    script: str, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(script).write_text(_SCRIPT + "# that no other test has")
    parse = Mock(side_effect=options._parsed)
    monkeypatch.setattr(options, "_parsed", parse)
    assert main(["sweep", "--gpu", "h100", "--vary", "heads=1,2,4,8", script]) == 0
    parse.assert_called_once()


def test_a_ranking_that_cannot_be_by_samples_says_so(
    script: str, recorded: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpu", "h100", "--samples", "100"]
    assert not _json([*words, "--vary", "batch-size=4", script], capfd)["notes"]
    Path(script).write_text("import torch\n")
    [note] = _json([*words, script], capfd)["notes"]
    assert note.startswith("not ranked by the time to 100 samples: ")


def test_captures_in_processes_of_this_machine(
    script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that fits, one that the script refuses, one whose value it refuses (with a message or
    without), one whose worker dies, one that this machine has no memory for."""
    found = _json(["--gpu", "rtx4090", "--vary", "heads=4,3,many,9,10,11", script], capfd)
    assert {row["values"]["heads"]: row["status"] for row in found["rows"]} == {
        "4": "fits",
        "3": "impossible",
        "many": "impossible",
        "9": "failed",
        "10": "failed",
        "11": "impossible",
    }
    reasons = {row["values"]["heads"]: row["reason"] for row in found["rows"]}
    assert "ValueError: 64 is no multiple of 3" in reasons["3"] and "SIGKILL" in reasons["9"]
    assert reasons["11"].endswith(
        "train.py ended with exit code 2, as scripts do that refuse their arguments"
    )
    assert reasons["many"].endswith("argument -H/--heads: invalid int value: 'many'")


def test_a_capture_that_takes_too_long_is_a_row(
    script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpu", "h100", "--vary", "heads=4", "--timeout", "0.05", script]
    (row,) = _json(words, capfd, code=4)["rows"]
    assert row["status"] == "failed"
    assert row["reason"] == "no answer within 0.05 s (--timeout)"


def test_nothing_fits_and_nothing_is_known(
    script: str, recorded: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--gpu", "64MiB", "--vary", "heads=4", script]) == 3
    assert "too large" in capfd.readouterr().out
    assert main(["sweep", "--gpu", "h100", "--vary", "heads=7", script]) == 4
    said = capfd.readouterr()
    assert "impossible" in said.out and "no combination has an answer" in said.err
