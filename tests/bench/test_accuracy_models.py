"""The replayed jobs build the public models: the parameter counts are the published ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests import warm

ACCURACY = Path(__file__).parents[2] / "bench" / "accuracy"

LANGUAGE_MODELS = {
    "EleutherAI/gpt-neo-125M": 125_198_592,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "T5-base": 222_903_552,
    "T5-small": 60_506_624,
    "bigscience/bloom-560m": 559_214_592,
    "cerebras/Cerebras-GPT-111M": 111_050_496,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "distilbert/distilgpt2": 81_912_576,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "google/gemma-2-2b-it": 2_614_341_888,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "microsoft/phi-1_5": 1_418_270_720,
    "openai-community/gpt2": 124_439_808,
}

# torchvision's own figures; where the measured job had 10 outputs instead of 1000, less the
# weights and biases of 990 outputs (of 1280 features, 1024 in the small MobileNetV3).
IMAGE_MODELS = {
    "ConvNeXtTiny": 28_589_128,
    "MnasNet": 4_383_312 - 1281 * 990,
    "MobeNetV3Large": 5_483_032 - 1281 * 990,
    "MobeNetV3Small": 2_542_856 - 1025 * 990,
    "MobileNetV2": 3_504_872,
    "RegNetX400MF": 5_495_976,
    "RegNetY400MF": 4_344_144,
    "ResNet18": 11_689_512,
    "EfficientNetB0": 5_288_548,
    "DenseNet121": 7_978_856,
}

COUNT = """
import json, sys
import torch
sys.path.insert(0, sys.argv[1])
try:
    import torchvision
except RuntimeError:  # a torchvision without its operators, as beside a CPU build of torch
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
loop = __import__(sys.argv[2])
device = "cpu" if sys.argv[2] == "cnn_loop" else "meta"
counts = {}
for name in sys.argv[3:]:
    with torch.device(device):
        counts[name] = sum(p.numel() for p in loop.build(name).parameters())
print(json.dumps(counts))
"""


def needs(package: str) -> None:
    """Skip without the package; not imported here, where its stub operators would stay."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def counts(loop: str, names: dict[str, int]) -> dict[str, int]:
    """Parameter counts by name, from a process of its own: stub operators stay in it."""
    done = warm.run(Path.cwd(), "-c", COUNT, str(ACCURACY), loop, *names)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_language_models_have_the_published_parameter_counts() -> None:
    needs("transformers")
    assert counts("transformer_loop", LANGUAGE_MODELS) == LANGUAGE_MODELS


def test_image_models_have_the_published_parameter_counts() -> None:
    needs("torchvision")
    assert counts("cnn_loop", IMAGE_MODELS) == IMAGE_MODELS
