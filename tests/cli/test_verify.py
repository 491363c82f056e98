"""`memplan verify`: refusals on a machine without a GPU, and the whole command with stand-ins for
the card: a tool that answers as nvidia-smi, and the functions of `torch.cuda` that measure."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from memplan.types.builder import TraceBuilder
from memplan.types.trace import EventKind, TraceMeta
from memplan.types.trace_file import save_trace
from tests.capturing.importers.snapshot_maker import MIB, Maker
from tests.schemas import read_answer

TRAIN = """
import sys, torch
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(100):
    net(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    print("step", step, sys.argv[1:], flush=True)
"""
CARD = """
import shutil, sys
if "memplan.runtime.measure" in sys.orig_argv:
    import torch
    answers = dict(
        init=lambda: None,
        synchronize=lambda: None,
        mem_get_info=lambda: (60, 100),
        memory_stats=dict,
        get_device_name=lambda: "NVIDIA L4",
        get_device_capability=lambda: (8, 9),
        max_memory_allocated=lambda: {allocated},
        max_memory_reserved=lambda: {reserved},
    )
    for name, value in answers.items():
        setattr(torch.cuda, name, value)
    torch.cuda.memory._record_memory_history = lambda *a, **k: None
    torch.cuda.memory._dump_snapshot = lambda file: shutil.copy({snapshot!r}, file)
"""


def verify(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder / "site"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "CUDA_VISIBLE_DEVICES": "0",
    }
    command = [sys.executable, "-m", "memplan", "verify", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script, and the trace of a job that asks for 30 and 50 MiB."""
    (tmp_path / "train.py").write_text(TRAIN)
    builder = TraceBuilder()
    for size in (30, 50):
        builder.append(EventKind.ALLOC, builder.new_storage(), size * MIB)
    save_trace(builder.build(TraceMeta(gpu="l4")), tmp_path / "job.trace")
    return tmp_path


def with_card(folder: Path, *sizes: int, reserved: int) -> None:
    """A card on which the run asks for `sizes` MiB."""
    maker = Maker()
    for size in sizes:
        maker.malloc(size * MIB)
    snapshot = folder / "snapshot.pickle"
    snapshot.write_bytes(pickle.dumps(maker.snapshot()))
    site, bin_ = folder / "site", folder / "bin"
    site.mkdir()
    bin_.mkdir()
    (site / "sitecustomize.py").write_text(
        CARD.format(allocated=sum(sizes) * MIB, reserved=reserved * MIB, snapshot=str(snapshot))
    )
    tool = bin_ / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA L4, 23034, 8.9'\n")
    tool.chmod(0o755)


def test_as_foreseen(folder: Path) -> None:
    with_card(folder, 30, 50, reserved=80)
    done = verify(folder, "--steps", "2", "--json", "job.trace", "train.py", "--lr", "3")
    assert done.returncode == 0, done.stderr
    answer = read_answer("verify", done.stdout)
    assert answer["holds"] and answer["first"] is None and not answer["surplus"]
    assert answer["requests_real"] == answer["requests_foreseen"] == 2
    assert done.stderr.count("step") == 1, "the second step ends the run before it is printed"
    assert "step 0 ['--lr', '3']" in done.stderr


def test_another_request_and_a_larger_peak(folder: Path) -> None:
    with_card(folder, 30, 70, reserved=900)
    done = verify(folder, "job.trace", "train.py")
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("above the estimate: ")
    assert "the runs part after 1 requests, by +20 MiB" in done.stdout
    done = verify(folder, "--calibrate", "job.trace", "train.py")
    assert "nothing to calibrate: NVML did not say" in done.stderr
    assert not (folder / "config").exists()


def test_refusals(folder: Path) -> None:
    for words, code, message in (
        (["job.trace", "train.py"], 4, "no GPU on this machine"),
        (["nothing.trace", "train.py"], 2, "nothing.trace does not exist"),
        (["job.trace"], 2, "no script given"),
        (["job.trace", "tran.py"], 2, "no script tran.py"),
        ([], 2, "no trace and no script given"),
    ):
        done = verify(folder, *words)
        assert done.returncode == code and message in done.stderr, (words, done.stderr)
