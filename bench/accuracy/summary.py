"""What the estimates are worth beside the measurements: pure functions over finished rows.

Errors are relative to the measured bytes, `|estimate / measured - 1|`. Percentiles interpolate
linearly, as the published figures of the same rows do.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.accuracy.rows import ESTIMATORS, FIXED_MODE, Row


@dataclass(frozen=True)
class Answer:
    """One estimate of one command: the bytes that are compared, and `fits` on the row's card."""

    variant: str
    bytes: int
    low_bytes: int
    high_bytes: int
    fits: bool | None
    retries: int
    seconds: float


@dataclass(frozen=True)
class Compared:
    """A row and its answers, at least one."""

    row: Row
    answers: list[Answer]
    failures: list[str] = field(default_factory=list)

    @property
    def best(self) -> Answer:
        """The answer nearest to the truth."""
        return min(self.answers, key=self.error_of)

    @property
    def fixed(self) -> Answer:
        """The answer of the fixed mode where the row's own is unknown, else the only one."""
        return next((a for a in self.answers if a.variant == f"mode {FIXED_MODE}"), self.best)

    def error_of(self, answer: Answer) -> float:
        return abs(answer.bytes / self.row.measured_bytes - 1)


def percentile_90(values: Sequence[float]) -> float:
    """The 90th percentile, interpolated linearly. Raises ValueError for no value."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    place = 0.9 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(errors: Sequence[float]) -> dict[str, float]:
    """Count, median, 90th percentile and worst of some errors."""
    return {
        "count": len(errors),
        "median_error": statistics.median(errors),
        "p90_error": percentile_90(errors),
        "worst_error": max(errors),
    }


def published(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """The published estimators on the rows that each of them supports."""
    errors: dict[str, list[float]] = {name: [] for name in ESTIMATORS}
    for row in rows:
        for name, value in row.published_bytes.items():
            errors[name].append(abs(value / row.measured_bytes - 1))
    return {name: spread(values) for name, values in errors.items() if values}


def _aggregate(compared: Sequence[Compared], answers: Sequence[Answer]) -> dict[str, Any]:
    pairs = list(zip(compared, answers, strict=True))
    return {
        **spread([one.error_of(answer) for one, answer in pairs]),
        "high_below_truth": sum(a.high_bytes < c.row.measured_bytes for c, a in pairs),
        "low_above_truth": sum(a.low_bytes > c.row.measured_bytes for c, a in pairs),
        "median_interval_width": statistics.median(
            (a.high_bytes - a.low_bytes) / c.row.measured_bytes for c, a in pairs
        ),
        "median_signed_error": statistics.median(
            a.bytes / c.row.measured_bytes - 1 for c, a in pairs
        ),
        "predicted_to_fit": sum(bool(answer.fits) for answer in answers),
    }


def summarize_jobs(compared: Sequence[Compared]) -> dict[str, Any]:
    """The figures of jobs.csv; every job there ran, so `predicted_to_fit` should be the count."""
    unrecorded = [one for one in compared if len(one.row.commands) > 1]
    summary = {
        **_aggregate(compared, [one.best for one in compared]),
        f"fixed_mode_{FIXED_MODE}": _aggregate(compared, [one.fixed for one in compared]),
        "published": published(one.row for one in compared),
    }
    if unrecorded:
        errors = [one.error_of(one.fixed) for one in unrecorded]
        summary[f"unrecorded_in_mode_{FIXED_MODE}"] = spread(errors)
    return summary


def summarize_llm(compared: Sequence[Compared]) -> dict[str, Any]:
    """The figures of llm.csv."""
    return _aggregate(compared, [one.best for one in compared])


def as_json(one: Compared) -> dict[str, Any]:
    """A row of the result file."""
    best, row = one.best, one.row
    return {
        "key": row.key,
        "gpu": row.gpu,
        "compared": row.measure,
        "measured_bytes": row.measured_bytes,
        "estimated_bytes": best.bytes,
        "low_bytes": best.low_bytes,
        "high_bytes": best.high_bytes,
        "signed_error": best.bytes / row.measured_bytes - 1,
        "variant": best.variant,
        "other_variants": {a.variant: a.bytes for a in one.answers if a is not best},
        "fits": best.fits,
        "retries": best.retries,
        "seconds": round(best.seconds, 2),
        "published_bytes": row.published_bytes,
        "assumed": row.assumed,
    }
