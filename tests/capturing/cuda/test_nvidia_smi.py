"""A script that asks `nvidia-smi` is answered as on the chosen card's machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from memplan.capturing.cuda import nvidia_smi
from memplan.types.device import find_profile


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    nvidia_smi.install(tmp_path / "bin", find_profile("h100"), 2)


def asked(*words: str) -> str:
    run = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.usefixtures("installed")
def test_answers() -> None:
    assert "NVIDIA H100 80GB HBM3" in asked()
    first, second = asked("-L").splitlines()
    assert first.startswith("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-")
    assert second.startswith("GPU 1: ")
    query = "--query-gpu=name, memory.total,memory.used"
    total = find_profile("h100").total_memory_bytes >> 20
    assert (
        asked(query, "--format=csv,noheader,nounits").splitlines()
        == [f"NVIDIA H100 80GB HBM3, {total}, 0"] * 2
    )
    head, row = asked("--id=1", "--query-gpu=index,memory.free,foo", "--format=csv").splitlines()
    assert head == "index, memory.free [MiB], foo"
    assert row == f"1, {total} MiB, [N/A]"
    assert asked("--query-compute-apps=pid,used_memory", "--format=csv,noheader") == ""


@pytest.mark.usefixtures("installed")
def test_what_is_not_known_is_refused() -> None:
    for words in (["topo", "-m"], ["-i", "7"], ["--query-gpu=name"]):
        run = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=False)
        assert run.returncode
        assert run.stdout or run.stderr
