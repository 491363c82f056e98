"""The pytest plugin, in sessions of its own."""

from __future__ import annotations

import json

import pytest

pytest_plugins = ["pytester"]

JOB = """
import torch
from torch import nn

def train(width, steps=3):
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(torch.randn(4096, width, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TESTS = """
import unittest
import pytest, torch
from job import train

def test_a_real_backward_pass_comes_first():
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()

@pytest.mark.limit_gpu_memory("2 GiB", gpu="rtx4090")
def test_fits():
    train(256)

@pytest.mark.limit_gpu_memory("900 MiB", gpu="rtx4090")
def test_grows():
    train({width})

@pytest.mark.limit_gpu_memory(gpu="rtx4090")
def test_one_step():
    train(256, steps=1)

def test_a_block(gpu_memory):
    with gpu_memory("2 GiB", gpu="rtx4090") as captured:
        train(256)
    assert captured.estimate().high_bytes < 2 << 30

class Case(unittest.TestCase):
    @pytest.mark.limit_gpu_memory("100 MiB")
    def test_of_unittest(self):
        train(256)
"""
FAULTS = """
import pytest
from job import train

@pytest.mark.limit_gpu_memory()
def test_no_limit():
    train(256)

@pytest.mark.limit_gpu_memory("much")
def test_no_size():
    train(256)

@pytest.mark.limit_gpu_memory("1 GiB", card="h100")
def test_misspelt():
    train(256)

@pytest.mark.limit_gpu_memory("1 GiB")
def test_no_cuda():
    pass

@pytest.mark.limit_gpu_memory("1 GiB")
def test_own_failure():
    train(256)
    assert False, "the test's own"
"""


def test_limits_baseline_and_growth(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(job=JOB, test_memory=TESTS.format(width=256))
    first = pytester.runpytest_subprocess("--memplan-update")
    first.assert_outcomes(passed=5, failed=1)
    first.stdout.fnmatch_lines(["*_ Case.test_of_unittest _*", "limit 100 MiB: exceeded by*"])
    first.stdout.fnmatch_lines(["*no baseline of this test in memplan-baseline.json*"])
    first.stdout.fnmatch_lines(["*one optimizer step was captured*run three*"])
    file = pytester.path / "memplan-baseline.json"
    kept = json.loads(file.read_text(encoding="utf-8"))["tests"]
    assert len(kept) == 5
    assert kept["test_memory.py::test_grows"]["gpu"] == "rtx4090"

    before = file.read_bytes()
    pytester.makepyfile(job="# a line more\n" + JOB, test_memory=TESTS.format(width=1024))
    second = pytester.runpytest_subprocess("-k", "test_grows")
    second.assert_outcomes(failed=1, deselected=5)
    second.stdout.fnmatch_lines(["peak * of 23.5 GiB: fits*", "limit 900 MiB: exceeded by up to*"])
    second.stdout.fnmatch_lines(
        [
            "in memplan-baseline.json: peak * on rtx4090",
            "grown since then:",
            "  +64 MiB  4096x4096 float32 activation relu in Sequential.1  job.py:* "
            "(was not among the largest)",
            "  +48 MiB  4096x4096 float32 temporary threshold_backward in *.1  job.py:* "
            "(was 16 MiB)",
            "  +15 MiB  4096x1024 float32 parameter 0.weight  job.py:* (was 1 MiB)",
        ]
    )
    assert file.read_bytes() == before


def test_what_is_wrong_with_a_test_is_said(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(job=JOB, test_faults=FAULTS)
    done = pytester.runpytest_subprocess("--memplan-update")
    done.assert_outcomes(failed=5)
    done.stdout.fnmatch_lines(["limit_gpu_memory: * has neither a limit nor a card", "*try: *"])
    done.stdout.fnmatch_lines(["limit_gpu_memory: 'much' is not a size"])
    done.stdout.fnmatch_lines(["limit_gpu_memory takes a limit and gpu=, not *card*"])
    done.stdout.fnmatch_lines(["limit_gpu_memory: the captured block asked for no GPU memory"])
    done.stdout.fnmatch_lines(["E * the test's own"])
    assert not (pytester.path / "memplan-baseline.json").exists()


def test_processes_of_xdist_share_one_baseline(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(job=JOB, test_memory=TESTS.format(width=256))
    (pytester.path / "pytest.ini").write_text("[pytest]\nmemplan_baseline = kept.json\n")
    done = pytester.runpytest_subprocess("--memplan-update", "-n", "2", "-k", "fits or a_block")
    done.assert_outcomes(passed=2)
    kept = json.loads((pytester.path / "kept.json").read_text(encoding="utf-8"))["tests"]
    assert set(kept) == {"test_memory.py::test_fits", "test_memory.py::test_a_block"}


def test_a_damaged_baseline_is_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(job=JOB, test_memory=TESTS.format(width=256))
    (pytester.path / "memplan-baseline.json").write_text('{"tests": 3}')
    done = pytester.runpytest_subprocess("-k", "test_fits")
    done.assert_outcomes(failed=1, deselected=5)
    done.stdout.fnmatch_lines(["limit_gpu_memory: *memplan-baseline.json: *", "*try: remove it*"])


def test_a_session_without_either_imports_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\n"
        "def test_nothing_is_imported():\n"
        "    assert 'torch' not in sys.modules and 'memplan.types' not in sys.modules\n"
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
