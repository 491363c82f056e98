"""`memplan recompute`: a captured trace in, peaks against added time out."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from memplan.capturing.module import capture_module
from memplan.capturing.options import CaptureOptions
from memplan.cli import main
from memplan.phases.step_graph import plain_peak, step_graph
from memplan.types.device import find_profile
from memplan.types.trace_file import load_trace, save_trace
from tests.estimation.jobs import training_job
from tests.schemas import read_answer


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = nn.Sequential(
        *(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 1)
    )
    options = CaptureOptions(profile=find_profile("rtx4090"))
    path = tmp_path_factory.mktemp("job") / "job.trace"
    save_trace(capture_module(module, (torch.randn(2048, 64),), {}, options), path)
    return path


def test_points_are_a_monotone_envelope(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["recompute", "--json", "--timeout", "3", str(job)]) == 0
    answer = read_answer("recompute", capfd.readouterr().out)
    plain = plain_peak(step_graph(load_trace(job)))
    assert answer["plain_peak_bytes"] == plain and answer["gpu"] == "rtx4090"
    points = answer["points"]
    assert len(points) >= 5
    assert points[0]["peak_bytes"] < 0.7 * plain
    assert points[-1]["peak_bytes"] == plain and points[-1]["added_seconds"] == 0
    for smaller, larger in pairwise(points):
        assert smaller["budget_bytes"] < larger["budget_bytes"]
        assert smaller["peak_bytes"] <= larger["peak_bytes"]
        assert smaller["added_seconds"] >= larger["added_seconds"]
    assert all(point["peak_bytes"] <= point["budget_bytes"] for point in points)


def test_a_budget(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain = plain_peak(step_graph(load_trace(job)))
    budget = str(int(0.8 * plain))
    assert main(["recompute", "--json", "--timeout", "3", "--budget", budget, str(job)]) == 0
    [point] = read_answer("recompute", capfd.readouterr().out)["points"]
    assert 0 < point["added_fraction"] < 1 and point["peak_bytes"] <= 0.8 * plain
    assert main(["recompute", "--timeout", "3", "--budget", "1GiB", str(job)]) == 0
    said = capfd.readouterr().out
    assert said.startswith("allocated peak") and "nothing to recompute" in said


def test_an_impossible_budget_says_what_is_possible(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["recompute", "--timeout", "3", "--budget", "1MiB", "--json", str(job)]) == 3
    answer = read_answer("recompute", capfd.readouterr().out)
    assert answer["points"] == []
    assert 1 << 20 < answer["least_peak_bytes"] < answer["plain_peak_bytes"]


def test_bad_input(tmp_path: Path, job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handmade = tmp_path / "hand.trace"
    save_trace(training_job(), handmade)
    for words, code, says in (
        (["--budget", "much", str(job)], 2, "much"),
        (["--timeout", "0", str(job)], 2, "seconds"),
        ([str(tmp_path / "none.trace")], 2, "none.trace"),
        ([str(Path(__file__))], 2, "trace"),
        ([str(handmade)], 4, ""),
    ):
        assert main(["recompute", *words]) == code
        out, err = capfd.readouterr()
        assert out == "" and says in err and "Traceback" not in err
