"""Whether the batch that ran is said to fit, and the next larger one not.

When the table was measured, each model's batch was lowered from 512 until a step ran on the card
of 24 GB. So the estimate has two answers to give: its batch fits, and the next larger one of those
tried does not. Of a model that ran with the first batch there is only one. A job that could not
be captured counts as a wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.timm_table.capture import FOLDER, GPU, trace_path
from bench.timm_table.rows import TimmRow, next_larger
from memplan.estimation.estimator import estimate
from memplan.types.device import find_profile
from memplan.types.trace_file import load_trace

GIB = 2**30


def one_format_each(rows: Iterable[TimmRow]) -> list[TimmRow]:
    """One row of each model: channels last for the first, contiguous for the second, and so on.
    The two ran with the same batch, but for one model in twenty."""
    models: dict[str, list[TimmRow]] = {}
    for row in rows:
        models.setdefault(row.model, []).append(row)
    return [
        next((one for one in found if one.memory_format == ("nhwc", "nchw")[i % 2]), found[0])
        for i, found in enumerate(models.values())
    ]


def asked(row: TimmRow) -> Iterator[tuple[TimmRow, bool]]:
    """The jobs of a row, with what is true: whether they fit."""
    yield row, True
    larger = next_larger(row.batch_size)
    if larger is not None:
        yield row.with_batch(larger), False


def score(
    rows: list[TimmRow], folder: Path = FOLDER, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The answers of all rows whose captures were made or failed, and how many are right.

    `known`: the `rows` of an earlier score, for those whose captures are no longer there.
    """
    card = find_profile(GPU)
    answers: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        jobs = list(asked(row))
        paths = [trace_path(job, folder) for job, _ in jobs]
        if not all(path.exists() or path.with_suffix(".failed").exists() for path in paths):
            if known is not None and row.key in known:
                answers[row.key] = known[row.key]
            continue
        answers[row.key] = []
        for (job, truth), path in zip(jobs, paths, strict=True):
            one: dict[str, Any] = {"batch_size": job.batch_size, "fits": None, "truth": truth}
            if path.exists():
                found = estimate(load_trace(path), card)
                sizes = (found.low_bytes, found.peak_bytes, found.high_bytes)
                one["fits"], one["gib"] = found.fits, [round(size / GIB, 2) for size in sizes]
            answers[row.key].append(one)
    right = {key: [one["fits"] is one["truth"] for one in both] for key, both in answers.items()}
    edges = [both for both in right.values() if len(both) == 2]

    def saying(fits: bool | None, place: slice) -> list[str]:
        return [
            key for key, both in answers.items() if fits in [one["fits"] for one in both[place]]
        ]

    return {
        "models": len(right),
        "right": sum(map(all, right.values())),
        "right_share": sum(map(all, right.values())) / max(len(right), 1),
        "with_two_answers": len(edges),
        "right_share_of_two": sum(map(all, edges)) / max(len(edges), 1),
        "said_not_to_fit": saying(False, slice(1)),
        "larger_said_to_fit": saying(True, slice(1, None)),
        "not_captured": saying(None, slice(None)),
        "rows": answers,
    }
