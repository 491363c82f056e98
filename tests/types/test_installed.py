"""Whose code a file is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import memplan
from memplan.types.installed import is_installed


@pytest.mark.parametrize(
    "file",
    [
        json.__file__,
        torch.__file__,
        memplan.__file__,
        pytest.__file__,
        "<frozen runpy>",
        "/home/me/.local/lib/python3.11/site-packages/transformers/trainer.py",
        "/usr/lib/python3/dist-packages/transformers/trainer.py",
    ],
)
def test_libraries(file: str) -> None:
    assert is_installed(file)


def test_what_pip_installed_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, packages, sources = (tmp_path / name for name in ("job", "packages", "sources"))
    for folder in (mine, packages):
        (folder / "trl-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(mine), str(sources), str(packages)])
    assert is_installed(str(packages / "trl" / "trainer.py"))
    assert not is_installed(str(mine / "train.py"))
    assert not is_installed(str(sources / "model.py"))
    assert not is_installed("<stdin>")
