"""trl's trainers, unmodified: preference with a reference model, and reinforcement learning with
generation by the model itself or by vLLM beside it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.scripts import make
from tests import warm

FOLDER = Path(sys.prefix, "trl")
"""Where `make` puts it: see pyproject.toml."""

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir() and importlib.util.find_spec("trl") is None, reason="trl is not installed"
)

GIB, MIB = 1 << 30, 1 << 20
CARD = 24 * GIB

ONLINE = """
import sys

import datasets
import trl

kind, model, *flags = sys.argv[1:]
settings = {
    "output_dir": "out",
    "report_to": [],
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
}
if "vllm" in flags:
    settings |= {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": 256,
        "vllm_enable_sleep_mode": "sleep" in flags,
    }

def reward(completions, completion_ids, **_):
    assert {len(tokens) for tokens in completion_ids} == {8}, "none ends early"
    return [float(len(text)) for text in completions]

trainer = getattr(trl, f"{kind}Trainer")(
    model=model,
    reward_funcs=reward,
    args=getattr(trl, f"{kind}Config")(**settings),
    train_dataset=datasets.Dataset.from_dict({"prompt": ["to be or not to be"] * 64}),
)
trainer.train()
"""

PREFERENCES = """
import sys

import datasets
import trl

row = {"prompt": "to be", "chosen": "or not to be", "rejected": "that is the question"}
trl.DPOTrainer(
    model=sys.argv[1],
    args=trl.DPOConfig("out", report_to=[], per_device_train_batch_size=2),
    train_dataset=datasets.Dataset.from_list([row] * 32),
).train()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model of 2 layers and a tokenizer."""
    made = tmp_path_factory.mktemp("trl")
    shape = ["vocab_size=4096", "hidden_size=256", "intermediate_size=512", "num_hidden_layers=2"]
    shape += ["num_attention_heads=4", "num_key_value_heads=2", 'dtype="bfloat16"']
    make.model(made / "model", "qwen2", shape)
    return made


PARAMETERS = 2 * 4096 * 256 + 2 * (256 * 256 * 2 + 256 * 128 * 2 + 512 + 3 * 256 * 512 + 512) + 256
"""Two embeddings; by layer four projections of attention, three biases, three of the MLP and two
norms; the last norm."""


def run(folder: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(program, encoding="utf-8")
    words = ("--gpu", "24GiB:sm89", "--steps", "2", str(script), *words)
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    return warm.memplan(folder, "estimate", "--json", *words, env=environment)


def estimated(folder: Path, program: str, *words: str) -> dict[str, Any]:
    done = run(folder, program, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_preferences_hold_a_reference_model_beside_the_one_that_learns(folder: Path) -> None:
    answer = estimated(folder, PREFERENCES, "model")
    weights = answer["breakdown"]["parameters"]
    assert 8 * PARAMETERS <= weights < 8 * PARAMETERS + MIB, "both in single precision"
    assert answer["stages"] == [] and answer["engines"] == []


def test_generation_by_the_model_itself_is_a_stage(folder: Path) -> None:
    answer = estimated(folder, ONLINE, "GRPO", "model")
    peaks = {one["stage"]: one["peak_bytes"] for one in answer["stages"]}
    assert list(peaks) == ["generation", "training"]
    assert max(peaks.values()) == answer["peak_bytes"]
    assert answer["engines"] == [] and answer["breakdown"]["engine"] == 0


@pytest.mark.parametrize(("kind", "sleep"), [("GRPO", True), ("RLOO", False)])
def test_vllm_shares_the_card(folder: Path, kind: str, sleep: bool) -> None:
    answer = estimated(folder, ONLINE, kind, "model", "vllm", *["sleep"] * sleep)
    [engine] = answer["engines"]
    peaks = {one["stage"]: one for one in answer["stages"]}
    requested = CARD * 3 // 10
    # In half precision; the rotary table has a row of 64 for each of 32,768 places.
    assert engine["weight_bytes"] == 2 * (PARAMETERS + 32768 * 64)
    assert engine["share"] == 0.3 and engine["sleeps"] == sleep and not engine["separate"]
    assert requested - 256 * MIB < engine["kv_cache_bytes"] < requested
    assert 0.7 < engine["largest_share"] < 1, "a small model leaves the card to the engine"
    held = {stage: one["engine_bytes"] for stage, one in peaks.items()}
    assert held["generation"] > requested - 256 * MIB
    if sleep:
        assert list(peaks) == ["engine start", "generation", "weight sync", "training"]
        assert held["training"] < 64 * MIB
        assert engine["weight_bytes"] <= held["weight sync"] < engine["weight_bytes"] + 64 * MIB
        assert peaks["training"]["peak_bytes"] < peaks["generation"]["peak_bytes"] - 6 * GIB
        assert answer["reserved_peak_bytes"] < GIB, "the pool is not the training's"
    else:
        assert held["training"] > requested - 256 * MIB
        assert answer["reserved_peak_bytes"] > requested - 256 * MIB


def test_a_share_too_small_for_the_weights_fails_as_vllm_does(folder: Path) -> None:
    done = run(folder, ONLINE.replace("0.3", "0.0005"), "GRPO", "model", "vllm")
    assert done.returncode == 4
    assert "No available memory for the cache blocks" in done.stderr
