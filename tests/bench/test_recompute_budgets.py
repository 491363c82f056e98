"""PyTorch's budget curve as measured, and how curves and models are judged."""

from __future__ import annotations

from typing import Any

import torch

from bench.recompute import budgets, inductor, transformers
from bench.recompute.contest import segment_counts
from bench.recompute.inductor import Point
from bench.recompute.summary import summarize
from bench.recompute.tracker import measure


def points(*pairs: tuple[int, int]) -> list[Point]:
    return [Point("dp", at / 10, *pair) for at, pair in enumerate(pairs)]


def test_the_front_is_what_nothing_beats() -> None:
    found = budgets.front(points((100, 9), (50, 8), (60, 8), (70, 5), (90, 5)))
    assert [(p.beyond_bytes, p.flops) for p in found] == [(70, 5), (50, 8)]


def test_inversions_are_lower_budgets_with_higher_peaks() -> None:
    assert budgets.inversions(points((100, 0), (50, 0), (60, 0), (70, 0))) == 1
    assert budgets.inversions(points((10, 0), (50, 0))) == 0


def test_a_low_budget_trades_flops_for_bytes() -> None:
    torch.manual_seed(0)
    training = transformers.gpt2(1, 32, 2, 64, dropout=0.0)
    full = inductor.flops(training.step)
    training.module.zero_grad(set_to_none=True)
    eager = measure(training.step, training.resident()).beyond_bytes
    found = inductor.curve(training, (0.2, 1.0))
    assert {point.solver for point in found} == set(inductor.solvers())
    for low, high in zip(found[::2], found[1::2], strict=True):
        assert high.flops == full < low.flops
        assert 0.5 * eager < high.beyond_bytes < 1.5 * eager


def test_segment_counts() -> None:
    assert segment_counts(50, every=True) == list(range(2, 51))
    assert segment_counts(5, every=False) == [2, 3, 4, 5]
    some = segment_counts(110, every=False)
    assert some[:3] == [2, 3, 4] and some[-1] == 110 and len(some) < 25


def model(peak: int, **changes: Any) -> dict[str, Any]:
    mine = {
        "peak_bytes": peak,
        "identical": True,
        "prediction_error": 0.01,
        "prediction_error_beyond": 0.02,
        "reduction": 0.7,
        "accumulating_added_fraction": 0.3,
    }
    return {"lowest_baseline_bytes": 100, "memplan": {**mine, **changes}}


def test_a_peak_above_any_baseline_is_not_the_lowest() -> None:
    data: dict[str, Any] = {"models": {"a": model(100), "b": model(101)}, "budgets": {}}
    found = summarize(data)
    assert (found["models"], found["models_lowest"], found["not_lowest"]) == (2, 1, ["b"])


def test_what_was_not_measured_is_missed() -> None:
    graph = {"pytorch_inversions": 2}
    found = summarize({"models": {"a": {"lowest_baseline_bytes": 1}}, "budgets": {"g": graph}})
    assert found["models_lowest"] == found["identical"] == found["graphs_on_or_below"] == 0
    assert found["worst_prediction_error"] == 1.0
    assert found["reductions"]["resnet-50"]["reduction"] == 0.0
    assert found["graphs_without_ours"] == 1
