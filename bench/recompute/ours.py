"""memplan's side of the comparison, by its public interface alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import memplan
from bench.recompute.case import Training


@dataclass(frozen=True)
class Applied:
    """What `memplan.auto_checkpoint` answered; it is in effect on the training's module."""

    handle: Any
    plan_seconds: float

    @property
    def promised_bytes(self) -> int:
        """The peak of forward and backward: weights, gradients and inputs in it."""
        return int(self.handle.peak_bytes)

    def remove(self) -> None:
        self.handle.remove()


def apply(
    training: Training,
    budget_bytes: int | None = None,
    cost: Literal["time", "flops"] = "time",
    most_added: float = 1 / 3,
) -> Applied:
    """Plan for the training's module and put the plan into effect; no budget: the least peak that
    adds at most `most_added` of the time.

    `cost` is what the plan adds as little of as it can. Raises what `auto_checkpoint` raises: for a
    budget that cannot be met, say.
    """
    began = time.perf_counter()
    handle = memplan.auto_checkpoint(
        training.module,
        *training.inputs,
        loss=training.loss,
        output_held=False,
        budget=budget_bytes,
        cost=cost,
        most_added=most_added,
    )
    return Applied(handle, time.perf_counter() - began)
