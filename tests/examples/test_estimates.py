"""Every example through `memplan estimate`, as a user would type it, against arithmetic by hand.

What a training job must hold at its peak follows from its sizes: parameters, gradients and the
optimizer's states. The estimate has to name the same figures, and cost little host memory. Of the
trace that it leaves, the step's graph has the same peak to the byte, and nearly all that autograd
saves is named as what recomputation may drop.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

from bench.process import peak_resident
from memplan.order.evaluate import peak, program_order
from memplan.phases import find_steps, op_graph, plain_peak, step_graph
from memplan.types.trace import EventKind, Trace
from memplan.types.trace_file import load_trace
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
HOST_LIMIT_BYTES = 4 * 2**30
NOT_SEEN_BYTES = 2**28
"""At most, of what a process has from the one that it was forked from: libraries."""
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Example:
    """An example and what its sizes say, in bytes.

    Attributes:
        parameters: all parameters, frozen ones too.
        gradients: those of the trained parameters.
        states: what the optimizer keeps for them.
        held: of what the forward pass makes, bytes that the script itself holds until the next
            step, so that they cannot be dropped.
        checkpoints: whether the script itself recomputes, from what is then not to be dropped.
        arguments: the script's.
    """

    name: str
    gpu: str
    parameters: int
    gradients: int
    states: int
    held: int = 0
    checkpoints: bool = False
    arguments: tuple[str, ...] = ()


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
    # Its batches differ in length, so that no step repeats: the epoch ends sooner here.
    short = ("--reviews", "160", "--evaluate-every", "3")
    return Example("hf_trainer", "rtx4090", 4 * count, 4 * count, 8 * count, arguments=short)


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
    logits = 4 * 1024 * vocab * 2  # in the model's output, which the script keeps
    return Example("moe", "rtx4090", 2 * count, 2 * count, 4 * count, held=logits)


def llama3_8b() -> Example:
    width, layers, vocab, key_width, inner = 4096, 32, 128256, 1024, 14336
    attention = 2 * width**2 + 2 * width * key_width
    count = 2 * vocab * width + layers * (attention + 3 * width * inner + 2 * width) + width
    return Example("llama3_8b", "h100", 2 * count, 2 * count, 4 * count, checkpoints=True)


EXAMPLES = [gpt2(), resnet50(), hf_trainer(), lora(), moe(), llama3_8b()]


@pytest.fixture(scope="module", params=EXAMPLES, ids=lambda example: example.name)
def example(request: pytest.FixtureRequest) -> Example:
    return request.param


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, example: Example) -> Path:
    """Of the trace that the command leaves."""
    return tmp_path_factory.mktemp("traces") / f"{example.name}.trace"


@pytest.fixture(scope="module")
def run(example: Example, path: Path) -> tuple[CompletedProcess[str], int]:
    """The whole command, once per example, and its most resident bytes."""
    words = [f"examples/{example.name}/train.py", *example.arguments]
    peaks = []
    done = warm.memplan(
        ROOT, "estimate", "--json", "--gpu", example.gpu, "-o", str(path), *words,
        env=ENVIRONMENT,
        follow=lambda process: peaks.append(peak_resident(process, 300.0)),
    )  # fmt: skip
    return done, peaks[0]


@pytest.fixture(scope="module")
def answer(run: tuple[CompletedProcess[str], int]) -> dict[str, Any]:
    done, _ = run
    assert done.returncode in (0, 3), done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def test_it_fits_the_card_it_is_meant_for(
    run: tuple[CompletedProcess[str], int], answer: dict[str, Any]
) -> None:
    assert answer["method"] == "fake-cuda"
    assert answer["fits"] is True, answer["peak_bytes"]
    assert run[0].returncode == 0
    assert answer["spare_bytes"] == answer["gpu"]["total_bytes"] - answer["peak_bytes"]


def test_the_peak_holds_parameters_gradients_and_states(
    example: Example, answer: dict[str, Any]
) -> None:
    persistent = example.parameters + example.gradients + example.states
    assert answer["allocated_peak_bytes"] >= persistent
    assert answer["low_bytes"] <= answer["peak_bytes"] <= answer["high_bytes"]
    assert (
        answer["requested_peak_bytes"]
        <= answer["allocated_peak_bytes"]
        <= answer["reserved_peak_bytes"]
        <= answer["peak_bytes"]
    )


def test_the_breakdown_names_the_same_bytes(example: Example, answer: dict[str, Any]) -> None:
    parts = answer["breakdown"]
    assert sum(parts.values()) == answer["peak_bytes"]
    assert min(parts.values()) >= 0
    slack = 1.01  # buffers: rotary tables, batch statistics
    assert example.parameters <= parts["parameters"] <= slack * example.parameters
    assert example.states <= parts["optimizer_state"] <= slack * example.states
    assert parts["gradients"] <= slack * example.gradients


def test_it_steps_and_says_why_it_stopped(answer: dict[str, Any]) -> None:
    assert answer["steps"] >= 2
    assert answer["stop_reason"]
    assert answer["command"][0].endswith("train.py")


def test_it_stays_under_4_gib_of_host_memory(run: tuple[CompletedProcess[str], int]) -> None:
    done, peak_bytes = run
    assert done.returncode in (0, 3), done.stderr[-3000:]
    assert 0 < peak_bytes < HOST_LIMIT_BYTES - NOT_SEEN_BYTES


def test_the_step_as_a_graph(example: Example, answer: dict[str, Any], path: Path) -> None:
    trace = load_trace(path)
    assert len(trace) == answer["events"]
    graph = step_graph(trace)
    assert plain_peak(graph) == _steady_peak(trace)
    whole = op_graph(trace)
    assert peak(whole, program_order(whole)) == _steady_peak(trace)
    if example.checkpoints:
        return
    values, forward = graph.values, graph.forward_ops
    made = (values.alloc >= 0) & (values.alloc < forward) & (values.free > forward)
    made &= graph.ops.call[np.clip(values.alloc, 0, None)] >= 0
    total = int(values.bytes[made].sum()) - example.held
    assert int(values.bytes[made & values.droppable].sum()) >= 0.98 * total > 0


def _steady_peak(trace: Trace) -> int:
    """The most requested bytes alive at once in the step that the graph is made of."""
    table = find_steps(trace)
    start, stop = table[table.steady if table.steady is not None else len(table) - 1]
    kind, nbytes = trace.events.kind, trace.events.bytes
    change = np.where(kind == EventKind.ALLOC, nbytes, 0) - np.where(
        kind == EventKind.FREE, nbytes, 0
    )
    alive = np.concatenate(([0], np.cumsum(change)))
    return int(alive[start : stop + 1].max())


def test_half_the_batch_needs_less_and_a_small_card_is_refused() -> None:
    found = []
    for batch in ("8", "4"):
        small = ("examples/gpt2/train.py", "--layers", "1", "--batch-size", batch)
        done = warm.memplan(ROOT, "estimate", "--json", "--gpu", "2GiB", *small)
        assert done.returncode in (0, 3), done.stderr[-3000:]
        found.append((done.returncode, json.loads(done.stdout)))
    (code, whole), (_, halved) = found
    # Four rows less save at least their logits, in half precision, and their fp32 gradient.
    saved = 4 * 1024 * 50257 * (2 + 4)
    assert whole["allocated_peak_bytes"] - halved["allocated_peak_bytes"] >= saved
    assert halved["breakdown"]["parameters"] == whole["breakdown"]["parameters"]
    assert code == 3 and whole["fits"] is False
    assert whole["missing_bytes"] > 0


@pytest.mark.parametrize(("routing", "said"), [("balanced", "evenly"), ("worst", "all the same")])
def test_a_loop_over_experts_rests_on_a_declared_routing(routing: str, said: str) -> None:
    length = 2048
    small = ("--implementation", "eager", "--vocab", "1000", "--layers", "1", "--experts", "8")
    words = ("examples/moe/train.py", *small, "--length", str(length))
    options = ("--json", "--gpu", "rtx4090", "--routing", routing)
    done = warm.memplan(ROOT, "estimate", *options, *words, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    texts = [each["text"] for each in found["assumptions"] if each["kind"] == "routing"]
    assert [text for text in texts if said in text]
    # However they are routed, each of the 4 x length tokens goes through four experts,
    # and each expert keeps its input, both halves of its gate and their product, in bf16.
    rows = 4 * length * 4
    saved = rows * (1024 + 2 * 512 + 512) * 2
    parts = found["breakdown"]
    persistent = parts["parameters"] + parts["optimizer_state"]
    assert found["allocated_peak_bytes"] >= persistent + saved
