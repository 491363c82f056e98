"""Every example is a program of its own: at a tiny size it trains on the CPU, without memplan."""

from __future__ import annotations

import json
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
# What examples import takes seconds: one process imports it and each example runs in a fork of it.
# A torchvision built for CUDA does not import beside a CPU build of torch without help, and neither
# do transformers' models.
RUNNER = """
import json, os, runpy, sys, traceback
from pathlib import Path
from memplan.capturing.standins.adapters import make_torchvision_importable
kept = make_torchvision_importable()
import torch._dynamo, torchvision
from transformers import BertForSequenceClassification, LlamaForCausalLM, Trainer

def run(name, words, environment):
    os.mkdir(name)
    os.chdir(name)
    for number, path in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")

for name, words, environment in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(name, words, environment)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    Path(f"{name}.code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each example said, in `NAME/stdout` and `NAME/stderr`; how it ended, in `NAME.code`."""
    folder = tmp_path_factory.mktemp("examples")
    runs = []
    for name, words in TINY.items():
        script = str(ROOT / "examples" / name / "train.py")
        output = ["--output", "out"] if name == "hf_trainer" else []
        alone = {**ALONE, "MASTER_PORT": "0"} if "fsdp" in name else {}
        runs.append((name, [script, *words.split(), *output], alone))
    command = [sys.executable, "-c", RUNNER, json.dumps(runs)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", TINY)
def test_it_trains_on_the_cpu(name: str, folder: Path) -> None:
    stdout, stderr = ((folder / name / stream).read_text() for stream in ("stdout", "stderr"))
    assert (folder / f"{name}.code").read_text() == "0", stderr[-3000:]
    assert "loss" in stdout
    assert "nan" not in stdout.lower()


def test_every_example_is_run_here() -> None:
    assert {path.parent.name for path in ROOT.glob("examples/*/train.py")} == set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_no_example_knows_of_memplan(name: str) -> None:
    assert "memplan" not in (ROOT / "examples" / name / "train.py").read_text(encoding="utf-8")
