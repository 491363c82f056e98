"""Every example is a program of its own: at a tiny size it trains on the CPU, without memplan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY_LLAMA = (
    "--device cpu --layers 2 --hidden 64 --heads 4 --kv-heads 2 --vocab 100 "
    "--batch-size 2 --length 32 --steps 3 --workers 0"
)
TINY = {
    "gpt2": "--device cpu --precision bf16 --layers 2 --width 64 --heads 2 --context 32 "
    "--vocab 100 --batch-size 2 --accumulate 2 --steps 4 --log-every 1 --workers 1",
    "resnet50": "--device cpu --arch resnet18 --image-size 32 --classes 10 --batch-size 4 "
    "--train-images 16 --test-images 8 --workers 0",
    "hf_trainer": "--cpu --layers 1 --hidden 32 --heads 4 --batch-size 4 --reviews 20 "
    "--length 32 --evaluate-every 5 --workers 0",
    "lora": TINY_LLAMA,
    "moe": TINY_LLAMA + " --experts 4 --experts-per-token 2 --expert-width 32",
    "llama3_8b": TINY_LLAMA + " --intermediate 128",
    "llama3_70b_fsdp": TINY_LLAMA.removesuffix(" --workers 0") + " --intermediate 128",
}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""What a launcher tells the one rank of a job."""
# A torchvision built for CUDA does not import beside a CPU build of torch without help, and neither
# do transformers' models.
RUNNER = """
import runpy, sys
from memplan.capture.packages import make_torchvision_importable
kept = make_torchvision_importable()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("name", TINY)
def test_it_trains_on_the_cpu(name: str, tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "out")] if name == "hf_trainer" else []
    script = ROOT / "examples" / name / "train.py"
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(script), *TINY[name].split(), *output],
        cwd=tmp_path,
        env={**os.environ, **({**ALONE, "MASTER_PORT": "0"} if "fsdp" in name else {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss" in done.stdout
    assert "nan" not in done.stdout.lower()


def test_every_example_is_run_here() -> None:
    assert {path.parent.name for path in ROOT.glob("examples/*/train.py")} == set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_no_example_knows_of_memplan(name: str) -> None:
    assert "memplan" not in (ROOT / "examples" / name / "train.py").read_text(encoding="utf-8")
