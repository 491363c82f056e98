"""memplan's side of the comparison, by its public interface alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import memplan
from bench.recompute.case import Training


class MissingError(Exception):
    """This memplan has no `auto_checkpoint`."""


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


def apply(training: Training, budget_bytes: int | None = None) -> Applied:
    """Plan for the training's module and put the plan into effect; None: the least peak.

    Raises MissingError, and what `auto_checkpoint` raises: for a budget that cannot be met, say.
    """
    plan = getattr(memplan, "auto_checkpoint", None)
    if plan is None:
        raise MissingError("memplan.auto_checkpoint")
    began = time.perf_counter()
    handle = plan(training.module, *training.inputs, loss=training.loss, budget=budget_bytes)
    return Applied(handle, time.perf_counter() - began)
