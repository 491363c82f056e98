"""The measured rows of `timm_rtx3090.csv`, the families of their models, and a sample of them."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from bench.accuracy.rows import SHARED_DATA

TABLE = SHARED_DATA / "measured" / "timm_rtx3090.csv"
BATCHES = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Tried one after the other when the table was measured, until one fitted."""


class TimmRow(NamedTuple):
    """A training step as measured on one RTX 3090."""

    model: str
    memory_format: str
    """`nchw` or `nhwc`."""
    batch_size: int
    image_size: int
    step_seconds: float

    @property
    def key(self) -> str:
        """The name of its trace."""
        return f"{self.model}.{self.memory_format}.{self.image_size}.{self.batch_size}"

    @property
    def arguments(self) -> list[str]:
        """For `bench/timm_table/train.py`."""
        layout = ["--channels-last"] if self.memory_format == "nhwc" else []
        return [
            "--model", self.model, "--batch-size", str(self.batch_size),
            "--image-size", str(self.image_size), *layout,
        ]  # fmt: skip

    def with_batch(self, batch_size: int) -> TimmRow:
        """The same job with another batch; its time is then not known."""
        return self._replace(batch_size=batch_size, step_seconds=float("nan"))


def next_larger(batch_size: int) -> int | None:
    """The batch tried before this one, which did not fit; None where this one was the first.
    Raises ValueError for a batch that was not tried."""
    place = BATCHES.index(batch_size)
    return BATCHES[place - 1] if place else None


def read_rows(file: Path = TABLE) -> list[TimmRow]:
    """Every row of the table, in its order. Raises OSError or KeyError where it cannot be read."""
    with file.open(newline="") as lines:
        return [
            TimmRow(
                row["model"],
                row["memory_format"],
                int(row["batch_size"]),
                int(row["image_size"]),
                float(row["step_ms"]) / 1e3,
            )
            for row in csv.DictReader(lines)
        ]


def families(models: list[str]) -> dict[str, str]:
    """By model: the file of timm that defines it, such as `resnet`."""
    from memplan.capturing.standins.adapters import make_torchvision_importable

    make_torchvision_importable()  # timm imports it
    from timm.models import model_entrypoint

    return {name: model_entrypoint(name).__module__.rpartition(".")[2] for name in models}


def spread_out(rows: list[TimmRow], family: dict[str, str]) -> list[TimmRow]:
    """The same rows in an order of which every beginning is spread over the families: the first
    model of each family, then the second of each, with all rows of a model side by side."""
    models: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(row.model for row in rows):
        models[family[name]].append(name)
    turn = {name: i for names in models.values() for i, name in enumerate(names)}
    return sorted(rows, key=lambda row: (turn[row.model], family[row.model], row.model))
