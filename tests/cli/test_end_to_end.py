"""A real script through the real capture, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memplan.capturing.sandbox import confine

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys, torch
print("the script was given", sys.argv[1:])
os.write(1, b"past Python's stdout")
net = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 8))
net = net.cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(20):
    optimizer.zero_grad()
    net(torch.randn(64, 4096, device="cuda")).sum().backward()
    optimizer.step()
"""
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def memplan(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memplan", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "CUDA_VISIBLE_DEVICES": "",
            **environment,
        },
    )


def test_a_script_on_a_card_too_small(folder: Path) -> None:
    words = ["--json", "--gpu", "512MiB:sm86", "-o", "job.trace", "train.py", "--json", "-o", "x"]
    done = memplan(folder, "estimate", *words)
    assert done.returncode == 3, done.stderr
    answer = json.loads(done.stdout)
    assert answer["fits"] is False and answer["missing_bytes"] > 0
    assert sum(answer["breakdown"].values()) == answer["peak_bytes"]
    weights = 4096 * 4096 * 4
    assert weights <= answer["breakdown"]["parameters"] < weights + MIB
    assert 2 * weights <= answer["breakdown"]["optimizer_state"] < 2 * weights + MIB
    assert answer["peak"]["source"].endswith("train.py:11")
    assert "the script was given ['--json', '-o', 'x']" in done.stderr
    assert "past Python's stdout" in done.stderr
    assert sorted(p.name for p in folder.iterdir()) == ["job.trace", "train.py"]

    again = memplan(folder, "simulate", "--json", "job.trace")
    assert again.returncode == 0, again.stderr
    replayed = json.loads(again.stdout)
    assert replayed["reserved_peak_bytes"] == answer["reserved_peak_bytes"]
    assert replayed["allocated_peak_bytes"] == answer["allocated_peak_bytes"]
    assert replayed["events"] == answer["events"]


def test_a_script_that_raises(folder: Path) -> None:
    (folder / "train.py").write_text("import torch\nraise ValueError('no data here')\n")
    done = memplan(folder, "estimate", "train.py")
    assert done.returncode == 4
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert "train.py:2" in done.stderr and "no data here" in done.stderr


NATIVE = """
import ctypes
libc = ctypes.CDLL(None)
print("native:", libc.creat(b"escaped", 0o600), flush=True)
open("log.txt", "w").write("in the overlay")
assert open("log.txt").read() == "in the overlay"
"""


@pytest.mark.skipif(not confine.can_confine_files(), reason="this kernel has no Landlock")
def test_native_code_is_kept_from_writing(folder: Path) -> None:
    """What no stand-in in Python sees, the kernel refuses; the answer is still written."""
    (folder / "train.py").write_text(NATIVE + SCRIPT)
    for name in ("out", "scratch"):
        (folder / name).mkdir()
    environment = {"TMPDIR": str(folder / "scratch")}
    done = memplan(folder, "estimate", "-o", "out/job.trace", "train.py", **environment)
    assert done.returncode == 0, done.stderr
    assert "native: -1" in done.stderr
    assert sorted(p.name for p in folder.iterdir()) == ["out", "scratch", "train.py"]
    assert [p.name for p in (folder / "out").iterdir()] == ["job.trace"]
    assert not list((folder / "scratch").glob("memplan-*"))
