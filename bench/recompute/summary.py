"""The figures that `bench/goals.toml` asks for, from everything that was measured."""

from __future__ import annotations

from typing import Any

REDUCTIONS = {
    "resnet-50": 0.63,
    "resnet-101": 0.74,
    "resnet-152": 0.81,
    "densenet-121": 0.78,
}
"""What Feng & Huang (CVPR 2021) publish for the peak without weights, gradients existing."""
ADDED = 0.35


def summarize(data: dict[str, Any]) -> dict[str, Any]:
    """Counts and extremes over the models and graphs; what was not measured counts as missed."""
    found = data["models"]
    mine = {name: row["memplan"] for name, row in found.items() if "memplan" in row}
    curves = {name: row["memplan"] for name, row in data["budgets"].items() if "memplan" in row}
    # A peak that is equal but for the few bytes of a saved generator state is no loss.
    lowest = [
        name for name, row in mine.items()
        if row["peak_bytes"] <= found[name]["lowest_baseline_bytes"]
    ]  # fmt: skip
    return {
        "models": len(found),
        "models_lowest": len(lowest),
        "not_lowest": sorted(set(found) - set(lowest)),
        "identical": sum(bool(row["identical"]) for row in mine.values()),
        "worst_prediction_error": max((r["prediction_error"] for r in mine.values()), default=1.0),
        "worst_prediction_error_beyond": max(
            (r["prediction_error_beyond"] for r in mine.values()), default=1.0
        ),
        "reductions": {name: _reduction(mine.get(name)) for name in REDUCTIONS},
        "graphs": len(data["budgets"]),
        "graphs_on_or_below": sum(curve["above"] == 0 for curve in curves.values()),
        "inversions": sum(curve["inversions"] for curve in curves.values()),
        "graphs_without_ours": len(data["budgets"]) - len(curves),
        "pytorch_inversions": sum(r["pytorch_inversions"] for r in data["budgets"].values()),
    }


def _reduction(row: dict[str, Any] | None) -> dict[str, float]:
    if row is None:
        return {"reduction": 0.0, "added_fraction": 1.0}
    return {"reduction": row["reduction"], "added_fraction": row["accumulating_added_fraction"]}
