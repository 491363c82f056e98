"""The examples' steps as graphs: their peaks to the byte, and nearly all that autograd saves named
as what recomputation may drop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memplan.order.evaluate import peak, program_order
from memplan.phases import find_steps, op_graph, plain_peak, step_graph
from memplan.types.trace import EventKind, Trace
from memplan.types.trace_file import load_trace

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ["--layers", "2", "--hidden", "256", "--heads", "4", "--kv-heads", "2", "--vocab", "1000"]
SMALL = {
    "gpt2": ["--layers", "2", "--width", "128", "--heads", "4", "--context", "128"],
    "resnet50": [],
    "lora": LLAMA,
    "moe": [*LLAMA, "--experts", "4", "--expert-width", "64"],
}
HELD_BY_THE_SCRIPT = {"moe": 2 * 4 * 1024 * 1000}
"""Logits in bf16, in the model's output, which the script keeps until the next step."""


@pytest.fixture(scope="module", params=SMALL)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("traces") / f"{request.param}.trace"
    script = [str(ROOT / "examples" / request.param / "train.py"), *SMALL[request.param]]
    command = [sys.executable, "-m", "memplan", "estimate", "--gpu", "a100-80gb", "-o", str(path)]
    subprocess.run([*command, *script], check=True, capture_output=True, cwd=path.parent)
    return load_trace(path)


def test_peak_and_droppable_share(example: Trace) -> None:
    graph = step_graph(example)
    table = find_steps(example)
    start, stop = table[table.steady if table.steady is not None else len(table) - 1]
    assert plain_peak(graph) == _true_peak(example, start, stop)

    values, forward = graph.values, graph.forward_ops
    made = (values.alloc >= 0) & (values.alloc < forward) & (values.free > forward)
    made &= graph.ops.call[np.clip(values.alloc, 0, None)] >= 0
    held = next(
        (
            size
            for name, size in HELD_BY_THE_SCRIPT.items()
            if f"examples/{name}/" in _script(example)
        ),
        0,
    )
    total = int(values.bytes[made].sum()) - held
    assert int(values.bytes[made & values.droppable].sum()) >= 0.98 * total > 0


def _script(trace: Trace) -> str:
    return " ".join(trace.meta.command)


def test_the_whole_step_as_a_graph_of_operators(example: Trace) -> None:
    graph = op_graph(example)
    table = find_steps(example)
    step = table.steady if table.steady is not None else len(table) - 1
    assert peak(graph, program_order(graph)) == _true_peak(example, *table[step])


def _true_peak(trace: Trace, start: int, stop: int) -> int:
    kind, nbytes = trace.events.kind, trace.events.bytes
    change = np.where(kind == EventKind.ALLOC, nbytes, 0) - np.where(
        kind == EventKind.FREE, nbytes, 0
    )
    alive = np.concatenate(([0], np.cumsum(change)))
    return int(alive[start : stop + 1].max())
