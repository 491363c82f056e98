"""How low the order of a whole training step brings its peak (`order.json`).

Each step is captured on fake tensors, forward, backward and Adam (foreach off) with gradients given
up at its end, and its order is planned. Columns: operators, the peak of program order, of the best
of Inductor's candidates and of ours, the lower bound, which its checker reads again, and seconds.
Beside them what ROAM published, of graphs of its own. `measured` is what a real step on the CPU
holds in both orders, where it is small enough.

    python -m bench.order [CASE…]
"""

from __future__ import annotations

import sys
import time
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from bench.order_jobs.graph import graph_of
from bench.order_jobs.measure import measured
from bench.order_jobs.models import CASES, Case
from bench.results import write_result
from memplan.api import compile as compile_step
from memplan.order.baselines import baseline_orders, best
from memplan.order.solve import solve
from memplan.order.validate import order_fault
from memplan.types.deadline import Deadline
from memplan.types.graph import Graph
from memplan.types.solution import Solved
from tests.oracles.certificate import certificate_of
from tests.oracles.check_bound import check_bound

DEADLINE = {"gpt2_xl": 120.0}
OTHERS_DEADLINE = 60.0
LARGE_OPS = 5_000
MOST_MEASURED_BYTES = 2 << 30
ROAM_PERCENT = {
    "AlexNet": {1: 10.7, 32: 10.7},
    "VGG": {1: 4.5, 32: 18.5},
    "MnasNet": {1: 10.3, 32: 0.6},
    "MobileNet": {1: 27.6, 32: 31.0},
    "EfficientNet": {1: 5.3, 32: 0.4},
    "ViT": {1: 28.1, 32: 0.3},
    "BERT": {1: 34.3, 32: 41.1},
}
"""Below program order, from ROAM's own result files (single stream, Adam, simulated)."""
TEN_PERCENT = ("mobilenet_v2_1", "vit_b_16_1", "bert_base_1")


def step_graph(case: Case) -> tuple[Graph, float]:
    """The step as a graph, and the seconds that capturing it took."""
    start = time.perf_counter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        training = case.training()
        step = compile_step(training.loss_of_batch, optimizer=training.optimizer)
        return graph_of(step).graph, time.perf_counter() - start


def row(case: Case) -> dict[str, Any]:
    graph, capture_seconds = step_graph(case)
    start = time.perf_counter()
    answer = solve(graph, deadline=Deadline(DEADLINE.get(case.name, OTHERS_DEADLINE)))
    seconds = time.perf_counter() - start
    order = answer.solution if isinstance(answer, Solved) else answer.best
    assert order is not None
    fault = order_fault(graph, order.order.tolist(), order.peak_bytes)
    bound = check_bound(graph, certificate_of(graph, order.proof))
    if fault or bound != answer.bound:
        raise AssertionError(f"{case.key}: {fault or 'the bound is not what its certificate says'}")
    candidates = baseline_orders(graph)
    program, baseline = candidates[0].peak_bytes, best(candidates)
    room = baseline.peak_bytes - bound
    result = {
        "operators": len(graph),
        "program_peak_bytes": program,
        "candidates": {c.name: c.peak_bytes for c in candidates},
        "baseline": baseline.name,
        "baseline_peak_bytes": baseline.peak_bytes,
        "ordered_peak_bytes": order.peak_bytes,
        "lower_bound_bytes": bound,
        "optimal": order.peak_bytes == bound,
        "below_program": 1 - order.peak_bytes / program,
        "room_taken": (baseline.peak_bytes - order.peak_bytes) / room if room else None,
        "roam_below_program": ROAM_PERCENT.get(case.roam, {}).get(case.batch),
        "seconds": seconds,
        "capture_seconds": capture_seconds,
    }
    if program <= MOST_MEASURED_BYTES:
        result["measured"] = measured(case, OTHERS_DEADLINE)
    return result


def main() -> None:
    wanted = sys.argv[1:]
    rows: dict[str, Any] = {}
    for case in CASES:
        if wanted and case.key not in wanted:
            continue
        rows[case.key] = row(case)
        print(case.key, rows[case.key], file=sys.stderr, flush=True)
    if not wanted:
        print(write_result("order", summary(rows)).read_text(encoding="utf-8"))


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """The rows and what the goals ask of them."""
    taken = [r["room_taken"] for r in rows.values() if r["room_taken"] is not None]
    measurements = [r["measured"] for r in rows.values() if "measured" in r]
    errors = [
        abs(m[f"{name}_bytes"] / m[f"predicted_{name}_bytes"] - 1)
        for m in measurements
        for name in ("program", "ordered")
    ]
    return {
        "rows": rows,
        "above_baseline": sum(
            r["ordered_peak_bytes"] > r["baseline_peak_bytes"] for r in rows.values()
        ),
        "with_room": len(taken),
        "least_room_taken": min(taken, default=1.0),
        "optimal": sum(r["optimal"] for r in rows.values()),
        "short_of_ten_percent": sum(
            r["below_program"] < 0.1 and not r["optimal"]
            for key, r in rows.items()
            if key in TEN_PERCENT
        ),
        "most_seconds_to_5000_operators": max(
            r["seconds"] for r in rows.values() if r["operators"] <= LARGE_OPS
        ),
        "most_seconds_gpt2_xl": max(
            r["seconds"] for key, r in rows.items() if key.startswith("gpt2_xl")
        ),
        "measured": len(measurements),
        "measured_worst_error": max(errors, default=None),
    }


if __name__ == "__main__":
    main()
