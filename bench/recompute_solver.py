"""How good the selections of the recompute solver are, and how soon (`recompute_solver.json`).

Small graphs: added time and least peak beside the optimum that CP-SAT proves. Large ones: all
budgets of a made step of a 32-layer Llama, of the captured step of one, and of the examples that
save the most; each point beside full checkpointing, square root of n, all other equal segments and
bytes per second.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.results import ROOT, write_result
from memplan.phases.step_graph import step_graph
from memplan.recompute.baselines import BytesPerSecond, equal_segments
from memplan.recompute.blocks import blocks_of
from memplan.recompute.evaluate import Evaluation, Evaluator, evaluate
from memplan.recompute.frontier import Point, frontier
from memplan.recompute.segments import Chain
from memplan.recompute.selection import Selection
from memplan.recompute.solve import Solver
from memplan.types.solution import Solved
from memplan.types.step_graph import StepGraph
from memplan.types.trace_file import load_trace
from tests.oracles.exact_selection import exact_peak, exact_seconds
from tests.recompute.graphs import chain, llama, residual_blocks, unet

PROOF_SECONDS = 60.0
SHARES = (0.0, 0.25, 0.5, 0.8)
"""Budgets between the least and the plain peak."""
SMALL: dict[str, StepGraph] = {
    "chain_8": chain(random.Random(1), 8),
    "chain_14": chain(random.Random(5), 14),
    "chain_20": chain(random.Random(7), 20),
    "residual_2": residual_blocks(random.Random(2), 2),
    "residual_4": residual_blocks(random.Random(4), 4),
    "unet_2": unet(random.Random(3), 2),
    "unet_3": unet(random.Random(9), 3),
    "transformer_block": llama(1),
}
LLAMA = (
    "examples/llama3_8b/train.py",
    "--no-checkpointing",
    *("--hidden", "2048", "--intermediate", "5632", "--vocab", "32000", "--batch-size", "4"),
)
CAPTURED: dict[str, tuple[str, ...]] = {
    "llama_32_layers": LLAMA,
    "gpt2": ("examples/gpt2/train.py",),
    "resnet50": ("examples/resnet50/train.py",),
}


def captured(command: tuple[str, ...]) -> StepGraph:
    """The step graph of a script captured for an H100."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.trace"
        estimate = ("-m", "memplan", "estimate", "--gpu", "h100", "-o", str(path))
        subprocess.run(
            (sys.executable, *estimate, *command), cwd=ROOT, check=True, capture_output=True
        )
        return step_graph(load_trace(path))


def small_result(graph: StepGraph) -> dict[str, Any]:
    """Ours beside the proved optimum; where nothing was proved in time, beside the best found."""
    plain = evaluate(graph, Selection()).peak_bytes
    lowest = exact_peak(graph, deadline_seconds=PROOF_SECONDS)
    ours = Solver().least_peak(graph, deadline_seconds=PROOF_SECONDS)
    assert isinstance(ours, Solved)
    proved = isinstance(lowest, Solved)
    least = int(lowest.cost) if isinstance(lowest, Solved) else int(ours.cost)
    points = [budget_result(graph, int(least + share * (plain - least))) for share in SHARES]
    return {
        "forward_ops": graph.forward_ops,
        "droppable": int(graph.values.droppable.sum()),
        "least_peak": {"proved": proved, "excess": ours.cost / least - 1},
        "budgets": points,
    }


def budget_result(graph: StepGraph, budget: int) -> dict[str, Any]:
    start = time.perf_counter()
    ours = Solver().solve(graph, budget, deadline_seconds=PROOF_SECONDS)
    seconds = time.perf_counter() - start
    best = exact_seconds(graph, budget, deadline_seconds=PROOF_SECONDS)
    cost = ours.cost if isinstance(ours, Solved) else float("inf")
    reference = float("inf") if not hasattr(best, "cost") else best.cost
    return {
        "budget_bytes": budget,
        "proved": isinstance(best, Solved),
        "excess": cost / reference - 1 if reference else float(cost > 0),
        "seconds": seconds,
    }


def large_result(graph: StepGraph) -> dict[str, Any]:
    """All budgets of a large graph: how long, how good, and whether a simple way is better."""
    start = time.perf_counter()
    points = frontier(graph, deadline_seconds=60)
    seconds = time.perf_counter() - start
    blocks = Chain(graph, blocks_of(graph, 1), [])
    judge = Evaluator(graph).evaluate
    count = len(blocks.blocks)
    simple = [judge(equal_segments(blocks, n)) for n in range(1, count + 1)]
    full, root = simple[-1], simple[max(1, round(math.sqrt(count))) - 1]
    greedy = BytesPerSecond(blocks)
    simple += [
        judge(greedy.first(count)) for count in range(1, len(greedy), len(greedy) // 100 + 1)
    ]
    return {
        "ops": len(graph),
        "droppable": int(graph.values.droppable.sum()),
        "seconds": seconds,
        "plain_peak_bytes": judge(Selection()).peak_bytes,
        "full_checkpointing": _figures(full),
        "square_root": _figures(root),
        "points": [_point(point, simple) for point in points],
        "simple_way_better": sum(_beaten(point, simple) for point in points),
        "inversions": sum(
            a.peak_bytes > b.peak_bytes or a.added_seconds < b.added_seconds
            for a, b in pairwise(points)
        ),
    }


def _figures(judged: Evaluation) -> dict[str, float]:
    return {"peak_bytes": judged.peak_bytes, "added_fraction": judged.added_fraction}


def _within(point: Point, simple: list[Evaluation]) -> float | None:
    """The least fraction that a simple way adds within the point's budget."""
    fitting = [s.added_fraction for s in simple if s.peak_bytes <= point.budget_bytes]
    return min(fitting, default=None)


def _beaten(point: Point, simple: list[Evaluation]) -> bool:
    best = _within(point, simple)
    return best is not None and best < point.added_fraction * (1 - 1e-9)


def _point(point: Point, simple: list[Evaluation]) -> dict[str, Any]:
    return {
        "budget_bytes": point.budget_bytes,
        "peak_bytes": point.peak_bytes,
        "added_fraction": point.added_fraction,
        "simple_added_fraction": _within(point, simple),
    }


def main() -> None:
    small = {name: small_result(graph) for name, graph in SMALL.items()}
    large = {"made_llama_32_layers": large_result(llama(32))}
    large |= {name: large_result(captured(command)) for name, command in CAPTURED.items()}
    budgets = [point for result in small.values() for point in result["budgets"]]
    peaks = [result["least_peak"] for result in small.values()]
    everything = [*budgets, *peaks]
    data = {
        "small": small,
        "small_proved": sum(entry["proved"] for entry in everything),
        "small_count": len(everything),
        "small_worst_excess": max(entry["excess"] for entry in everything),
        "large": large,
        "large_simple_way_better": sum(r["simple_way_better"] for r in large.values()),
        "large_inversions": sum(r["inversions"] for r in large.values()),
    }
    print(write_result("recompute_solver", data).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
