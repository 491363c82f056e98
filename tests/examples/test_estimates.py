"""Every example through `memplan estimate`, as a user would type it, against arithmetic by hand.

What a training job must hold at its peak follows from its sizes: parameters, gradients and the
optimizer's states. The estimate has to name the same figures, and cost little host memory.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.process import Run, watch

ROOT = Path(__file__).resolve().parents[2]
HOST_LIMIT_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Example:
    """An example and what its sizes say, in bytes.

    Attributes:
        parameters: all parameters, frozen ones too.
        gradients: those of the trained parameters.
        states: what the optimizer keeps for them.
    """

    name: str
    gpu: str
    parameters: int
    gradients: int
    states: int


def gpt2() -> Example:
    width, layers, vocab, context = 768, 12, 50257, 1024
    block = 12 * width**2 + 13 * width
    count = (vocab + context) * width + layers * block + 2 * width
    return Example("gpt2", "rtx4090", 4 * count, 4 * count, 8 * count)


def resnet50() -> Example:
    stages = ((64, 3), (128, 4), (256, 6), (512, 3))
    count, inputs = 3 * 64 * 49 + 2 * 64, 64
    for width, blocks in stages:
        outputs = 4 * width
        count += inputs * outputs + 2 * outputs  # the shortcut's projection
        for _ in range(blocks):
            convolutions = inputs * width + 9 * width**2 + width * outputs
            count += convolutions + 2 * (width + width + outputs)
            inputs = outputs
    count += inputs * 1000 + 1000
    return Example("resnet50", "rtx4090", 4 * count, 4 * count, 4 * count)


def hf_trainer() -> Example:
    width, layers, vocab = 768, 12, 30522
    embeddings = (vocab + 512 + 2) * width + 2 * width
    attention = 4 * (width**2 + width)
    mlp = 2 * 4 * width**2 + 4 * width + width
    count = embeddings + layers * (attention + mlp + 4 * width)
    count += width**2 + width + 2 * width + 2  # pooler and classifier
    return Example("hf_trainer", "rtx4090", 4 * count, 4 * count, 8 * count)


def lora() -> Example:
    width, layers, vocab, key_width, rank = 2048, 16, 128256, 512, 16
    attention = 2 * width**2 + 2 * width * key_width
    base = vocab * width + layers * (attention + 3 * 4 * width**2 + 2 * width) + width
    adapters = layers * rank * 2 * ((width + width) + (width + key_width))
    # The adapters of a bf16 model are kept, and trained, in fp32.
    return Example("lora", "rtx4090", 2 * base + 4 * adapters, 4 * adapters, 8 * adapters)


def moe() -> Example:
    width, layers, vocab, heads, kv_heads, experts, expert = 1024, 8, 151936, 16, 4, 32, 512
    head = width // heads
    attention = 2 * width**2 + 2 * width * kv_heads * head + 2 * head
    router_and_experts = width * experts + experts * 3 * width * expert
    count = vocab * width + layers * (attention + router_and_experts + 2 * width) + width
    return Example("moe", "rtx4090", 2 * count, 2 * count, 4 * count)


def llama3_8b() -> Example:
    width, layers, vocab, key_width, inner = 4096, 32, 128256, 1024, 14336
    attention = 2 * width**2 + 2 * width * key_width
    count = 2 * vocab * width + layers * (attention + 3 * width * inner + 2 * width) + width
    return Example("llama3_8b", "h100", 2 * count, 2 * count, 4 * count)


EXAMPLES = [gpt2(), resnet50(), hf_trainer(), lora(), moe(), llama3_8b()]
every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


@functools.cache
def estimated(example: Example) -> Run:
    """The whole command, once per example."""
    return estimate(example.gpu, example.name)


def estimate(gpu: str, name: str, *arguments: str, options: tuple[str, ...] = ()) -> Run:
    script = f"examples/{name}/train.py"
    command = [sys.executable, "-m", "memplan", "estimate", "--json", "--gpu", gpu, *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return watch([*command, script, *arguments], cwd=ROOT, env=environment)


def answer(example: Example) -> dict[str, Any]:
    run = estimated(example)
    assert run.code in (0, 3), run.stderr[-3000:]
    return dict(json.loads(run.stdout))


@every_example
def test_it_fits_the_card_it_is_meant_for(example: Example) -> None:
    found = answer(example)
    assert found["method"] == "fake-cuda"
    assert found["fits"] is True, found["peak_bytes"]
    assert estimated(example).code == 0
    assert found["spare_bytes"] == found["gpu"]["total_bytes"] - found["peak_bytes"]


@every_example
def test_the_peak_holds_parameters_gradients_and_states(example: Example) -> None:
    found = answer(example)
    assert found["allocated_peak_bytes"] >= example.parameters + example.gradients + example.states
    assert found["low_bytes"] <= found["peak_bytes"] <= found["high_bytes"]
    assert (
        found["requested_peak_bytes"]
        <= found["allocated_peak_bytes"]
        <= found["reserved_peak_bytes"]
        <= found["peak_bytes"]
    )


@every_example
def test_the_breakdown_names_the_same_bytes(example: Example) -> None:
    found = answer(example)
    parts = found["breakdown"]
    assert sum(parts.values()) == found["peak_bytes"]
    assert min(parts.values()) >= 0
    slack = 1.01  # buffers: rotary tables, batch statistics
    assert example.parameters <= parts["parameters"] <= slack * example.parameters
    assert example.states <= parts["optimizer_state"] <= slack * example.states
    assert parts["gradients"] <= slack * example.gradients


@every_example
def test_it_steps_and_says_why_it_stopped(example: Example) -> None:
    found = answer(example)
    assert found["steps"] >= 2
    assert found["stop_reason"]
    assert found["command"][0].endswith("train.py")


@every_example
def test_it_stays_under_4_gib_of_host_memory(example: Example) -> None:
    assert answer(example)
    assert estimated(example).peak_rss_bytes < HOST_LIMIT_BYTES


def test_a_larger_batch_needs_more() -> None:
    run = estimate("rtx4090", "gpt2", "--batch-size", "4")
    assert run.code == 0, run.stderr[-3000:]
    default, halved = answer(gpt2()), json.loads(run.stdout)
    # Four rows less save at least their logits, in half precision, and their fp32 gradient.
    saved = 4 * 1024 * 50257 * (2 + 4)
    assert default["allocated_peak_bytes"] - halved["allocated_peak_bytes"] >= saved
    assert halved["breakdown"]["parameters"] == default["breakdown"]["parameters"]


def test_a_small_card_is_refused_with_the_missing_bytes() -> None:
    run = estimate("2GiB", "gpt2")
    assert run.code == 3, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert found["fits"] is False
    assert found["missing_bytes"] > 0


@pytest.mark.parametrize(("routing", "said"), [("balanced", "evenly"), ("worst", "all the same")])
def test_a_loop_over_experts_rests_on_a_declared_routing(routing: str, said: str) -> None:
    layers, length = 2, 2048
    run = estimate(
        "rtx4090", "moe", "--implementation", "eager", "--vocab", "1000",
        "--layers", str(layers), "--length", str(length), options=("--routing", routing),
    )  # fmt: skip
    assert run.code == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    texts = [each["text"] for each in found["assumptions"] if each["kind"] == "routing"]
    assert [text for text in texts if said in text]
    # However they are routed, each of the 4 x length tokens goes through four experts in every
    # layer, and each expert keeps its input, both halves of its gate and their product, in bf16.
    rows = 4 * length * 4
    saved = layers * rows * (1024 + 2 * 512 + 512) * 2
    parts = found["breakdown"]
    persistent = parts["parameters"] + parts["optimizer_state"]
    assert found["allocated_peak_bytes"] >= persistent + saved
