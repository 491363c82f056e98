"""What runs on the GPU, as far as it can be held to account without one."""

from __future__ import annotations

import json
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_estimate import FOLDER
from tests import warm

STAND_IN = """
import pickle, sys
import torch
names = dict(
    init=lambda: None,
    synchronize=lambda: None,
    mem_get_info=lambda: (60, 100),
    memory_stats=lambda: {"requested_bytes.all.peak": 7, "num_alloc_retries": 1},
    get_device_name=lambda: "Card",
    get_device_capability=lambda: (9, 0),
    max_memory_allocated=lambda: 10,
    max_memory_reserved=lambda: 20,
)
for name, value in names.items():
    setattr(torch.cuda, name, value)
torch.cuda.memory._record_memory_history = lambda *a, **k: print("recording", k["context"])
torch.cuda.memory._dump_snapshot = lambda file: open(file, "wb").write(pickle.dumps({}))
from memplan.runtime import measure
sys.exit(measure.main(sys.argv[1:]))
"""


def measure(tmp_path: Path, script: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Measure a script with the CUDA calls replaced: (code, stdout, its JSON)."""
    file = tmp_path / "script.py"
    file.write_text(script)
    out, snapshot = tmp_path / "out.json", tmp_path / "snapshot.pickle"
    done = warm.run(Path.cwd(), "-c", STAND_IN, str(out), str(snapshot), str(file), *arguments)
    assert out.exists(), done.stderr
    assert pickle.loads(snapshot.read_bytes()) == {}
    return done.returncode, done.stdout, json.loads(out.read_text())


def test_a_script_is_measured_as_main_with_its_own_arguments(tmp_path: Path) -> None:
    code, stdout, found = measure(
        tmp_path, "import sys; print('ran', __name__, sys.argv[1:])", "--lr", "3"
    )
    assert code == 0
    assert stdout.splitlines() == ["recording alloc", "ran __main__ ['--lr', '3']"]
    assert found["error"] == ""
    assert (found["max_memory_allocated"], found["max_memory_reserved"]) == (10, 20)
    assert found["device_used_bytes"] == 40


@pytest.mark.parametrize(
    ("script", "told"), [("1 / 0", "ZeroDivisionError"), ("raise SystemExit(3)", "exit code 3")]
)
def test_a_script_that_fails_still_leaves_its_measurements(
    tmp_path: Path, script: str, told: str
) -> None:
    code, _, found = measure(tmp_path, script)
    assert code == 1
    assert told in found["error"]
    assert found["max_memory_reserved"] == 20


@pytest.mark.parametrize(
    "arguments",
    [
        "--model decoder --length 16 --layers 1 --sdpa math --mask --checkpoint --accumulate 2",
        "--model unet --length 32 --channels-last --clip 1 --optimizer sgd --precision amp-bf16",
        "--model lstm --length 8 --dropout 0.2 --precision bf16",
    ],
)
def test_the_jobs_script_trains_on_the_cpu(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--batch", "2", "--steps", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments.split(), *small])
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")
    assert "step 1: loss" in capsys.readouterr().out


def test_requests_are_paired_with_their_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from scratch import pair_requests  # type: ignore[import-not-found]

    def entry(action: str, addr: int, size: int = 0) -> dict[str, Any]:
        return {"action": action, "addr": addr, "size": size}

    history = [
        entry("segment_alloc", 1, 2 << 20),
        entry("alloc", 1, 512),
        entry("free_requested", 1, 512),
        entry("free_completed", 1, 512),
        entry("alloc", 1, 1024),
        entry("alloc", 600, 8),
        entry("free_requested", 999, 4),
    ]
    assert pair_requests(history) == [[512, True], [1024, False], [8, False]]


def test_scratch_cases_are_distinct_and_cover_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from scratch_cases import (  # type: ignore[import-not-found]
        CONVOLUTIONS,
        convolution_cases,
        native_cases,
    )

    convolutions = [(case.op, case.words) for case in convolution_cases()]
    assert len(convolutions) == len(set(convolutions)) == len(CONVOLUTIONS) * 5 * 4
    native = [(case.op, case.words, case.backward) for case in native_cases()]
    assert len(native) == len(set(native))
