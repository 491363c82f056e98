"""The process after a sandbox is as it was before it."""

from __future__ import annotations

import builtins
import fcntl
import io
import logging
import multiprocessing.spawn
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from memplan.capturing.sandbox import Sandbox
from memplan.capturing.sandbox.scratch import remove_scratch
from memplan.types.errors import CaptureError, InternalError

MODULES = (os, builtins, io, shutil, subprocess, sqlite3, socket, tempfile, torch, torch.jit)


def attributes() -> dict[tuple[str, str], int]:
    owners: list[Any] = [*MODULES, socket.socket, multiprocessing.spawn]
    external = sys.modules["_frozen_importlib_external"]
    return {
        (owner.__name__, name): id(value)
        for owner in [*owners, external]
        for name, value in list(vars(owner).items())
        if name not in ("_io_warned",)
    }


def test_every_attribute_is_put_back() -> None:
    with Sandbox():  # What is imported on the first use stays imported.
        torch.save(1, io.BytesIO())
    before = attributes()
    paths = list(sys.meta_path)
    with Sandbox():
        assert attributes() != before
    assert attributes() == before
    assert sys.meta_path == paths


def test_what_the_script_changed_is_put_back(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGUSR1)
    root = logging.getLogger()
    state = (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    before = (os.getcwd(), dict(os.environ), list(sys.path), list(sys.argv), root.level)
    handlers, filters = list(root.handlers), list(warnings.filters)
    arguments = sys.argv
    with Sandbox():
        os.chdir(tmp_path)
        os.environ["NEW"] = "1"
        os.environ.pop("PATH")
        sys.path.insert(0, "x")
        sys.argv = ["train.py"]
        random.seed(1)
        np.random.seed(1)
        root.setLevel(7)
        root.addHandler(logging.NullHandler())
        warnings.simplefilter("error")
        signal.signal(signal.SIGUSR1, lambda *_: None)
    assert (os.getcwd(), dict(os.environ), list(sys.path), list(sys.argv), root.level) == before
    assert sys.argv is arguments
    assert list(root.handlers) == handlers
    assert list(warnings.filters) == filters
    assert signal.getsignal(signal.SIGUSR1) is handler
    after = (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    assert after == state


def test_it_is_removed_when_the_script_fails(tmp_path: Path) -> None:
    before = attributes()
    with pytest.raises(ZeroDivisionError), Sandbox() as box:
        os.mkdir(tmp_path / "locked", 0o000)
        os.chmod(tmp_path / "locked", 0o000)
        raise ZeroDivisionError
    assert not box.scratch.exists()
    assert attributes() == before


def test_a_function_kept_from_a_sandbox_works_after_it(tmp_path: Path) -> None:
    with Sandbox():
        kept: list[Any] = [open, os.listdir]
    with kept[0](tmp_path / "x", "w") as file:
        file.write("real")
    assert kept[1](tmp_path) == ["x"]


def test_one_at_a_time() -> None:
    with Sandbox(), pytest.raises(InternalError, match="already open"), Sandbox():
        pass
    with Sandbox():
        pass


def test_what_a_killed_process_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("memplan-killed", "memplan-recent", "memplan-alive", "memplan-foreign"):
        (tmp_path / name).mkdir()
        if name != "memplan-foreign":
            (tmp_path / name / "journal").write_text("")
            os.utime(tmp_path / name / "journal", None if name == "memplan-recent" else (1, 1))
    with (tmp_path / "memplan-alive/journal").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with Sandbox() as box:
            assert box.scratch.parent == tmp_path
    assert sorted(os.listdir(tmp_path)) == ["memplan-alive", "memplan-foreign", "memplan-recent"]


def test_two_processes_may_remove_the_same_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memplan-x/upper/run").mkdir(parents=True)
    look = os.lstat

    def too_late(path: str) -> os.stat_result:
        shutil.rmtree(tmp_path / "memplan-x", ignore_errors=True)
        return look(path)

    monkeypatch.setattr("posix.lstat", too_late)
    remove_scratch(str(tmp_path / "memplan-x"))
    assert not (tmp_path / "memplan-x").exists()


def test_no_place_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(CaptureError, match="TMPDIR"), Sandbox():
        pass


class Files(Dataset[int]):
    """Each item is read from one file and written to another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        value = int((self.folder / f"{index}.txt").read_text())
        (self.folder / f"seen-{index}.txt").write_text("seen")
        return value


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers_share_the_view(tmp_path: Path, method: str) -> None:
    with Sandbox():
        for index in range(8):
            (tmp_path / f"{index}.txt").write_text(str(index * index))
        loader = DataLoader(
            Files(tmp_path), batch_size=4, num_workers=2, multiprocessing_context=method
        )
        batches = [batch.tolist() for batch in loader]
        assert batches == [[0, 1, 4, 9], [16, 25, 36, 49]]
        assert len(list(tmp_path.glob("seen-*.txt"))) == 8
    assert os.listdir(tmp_path) == []
