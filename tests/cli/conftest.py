"""What tests of the command line share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing from this machine: variables that launchers read, settings of accelerate."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PET_", "ACCELERATE_", "FSDP_")) or name in (
            "OMP_NUM_THREADS",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"),
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-settings"))
