"""What came of the cells, as rows in the order in which they are worth choosing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from memplan.sweep.answer import By, Kept, Row
from memplan.sweep.run import Cell, Done
from memplan.sweep.store import Store

_RANKINGS: tuple[By, ...] = get_args(By)
_SECONDS_PER_HOUR = 3600.0


def ranked(
    cells: Sequence[Cell],
    done: Done,
    store: Store | None,
    samples: int | None = None,
    prices: Mapping[str, float] | None = None,
) -> tuple[list[Row], By]:
    """Rows, those that fit first and the best of them at the top, and what they are ranked by: the
    first of money, time to the samples, throughput, step time and memory that all of them have,
    where that is equal by the next.

    `prices`: of one GPU of each card for an hour.
    """
    rows = [
        _row(cell, done.found.get(position), store, samples, prices or {})
        for position, cell in enumerate(cells)
    ]
    good = [row for row in rows if row.status in ("fits", "fits_with_plan")]
    known = [name for name in _RANKINGS if all(_worth(row, name) is not None for row in good)]
    good.sort(key=lambda row: [_worth(row, name) for name in known])
    placed = [msgspec.structs.replace(row, place=place) for place, row in enumerate(good, 1)]
    order = ("too_large", "impossible", "failed", "not_done")
    rest = [row for row in rows if row.status in order]
    rest.sort(key=lambda row: (order.index(row.status), row.high_bytes or 0))
    return [*placed, *rest], known[0]


def _worth(row: Row, by: By) -> float | None:
    """A value to rank by; less is better."""
    found: float | None = row.high_bytes if by == "peak_bytes" else getattr(row, by)
    return -found if found is not None and by == "samples_per_second" else found


def _row(
    cell: Cell,
    kept: Kept | None,
    store: Store | None,
    samples: int | None,
    prices: Mapping[str, float],
) -> Row:
    if kept is None:
        return Row(gpu=cell.gpu, values=cell.values, status="not_done", command=cell.command)
    known: dict[str, Any] = {}
    if kept.estimate is not None:
        known = {**_figures(cell, kept), "answer": str(store.path(cell.key())) if store else None}
        known |= _price(cell.gpu, known, samples, prices)
    return Row(
        gpu=cell.gpu,
        values=cell.values,
        status=kept.status,
        reason=kept.reason,
        hint=kept.hint,
        plan=kept.plan,
        added_fraction=kept.added_fraction if kept.after is not None else None,
        command=cell.command,
        **known,
    )


def _figures(cell: Cell, kept: Kept) -> dict[str, Any]:
    estimate, plain = kept.estimate, kept.before
    assert estimate is not None and plain is not None
    longer = 1 + kept.added_fraction

    def with_plan(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * longer

    step = with_plan(plain.step_seconds)
    samples = None if cell.samples is None else cell.samples.per_step(plain)
    return {
        "gpus": (estimate.world_size or 1) // estimate.card_processes or 1,
        "peak_bytes": estimate.peak_bytes * estimate.card_processes,
        "low_bytes": estimate.low_bytes * estimate.card_processes,
        "high_bytes": estimate.high_bytes * estimate.card_processes,
        "total_bytes": estimate.gpu.total_bytes if estimate.gpu else None,
        "step_seconds": step,
        "step_low_seconds": with_plan(plain.step_low_seconds),
        "step_high_seconds": with_plan(plain.step_high_seconds),
        "samples_per_step": samples,
        "samples_per_second": samples / step if samples and step else None,
    }


def _price(
    gpu: str, known: Mapping[str, Any], samples: int | None, prices: Mapping[str, float]
) -> dict[str, float]:
    per_second = known["samples_per_second"]
    if samples is None or per_second is None:
        return {}
    seconds = math.ceil(samples / known["samples_per_step"]) * known["step_seconds"]
    if gpu not in prices:
        return {"seconds": seconds}
    return {"seconds": seconds, "cost": prices[gpu] * known["gpus"] * seconds / _SECONDS_PER_HOUR}
