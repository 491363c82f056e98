"""Answers to be placed, with the figures that placing reads."""

from __future__ import annotations

from typing import Any

import msgspec

from memplan.estimation import estimate
from memplan.types.device import find_profile
from memplan.types.estimate import Estimate
from memplan.types.trace import Trace
from tests.estimation.jobs import training_job

GIB = 1 << 30


def trace_of(gpu: str) -> Trace:
    """A small training job, captured for a card."""
    trace = training_job()
    trace.meta.gpu = gpu
    return trace


def answer_of(gpu: str, high_bytes: int, *, host: int | None = None, **fields: Any) -> Estimate:
    """The answer about a job that needs so much of a card."""
    card = find_profile(gpu)
    answer = estimate(trace_of(gpu), card)
    known: dict[str, Any] = {"host_processes": 1, "fits": high_bytes <= card.total_memory_bytes}
    if host is not None:
        known |= {"host_high_bytes": host // 8, "host_node_high_bytes": host}
    return msgspec.structs.replace(answer, high_bytes=high_bytes, **(known | fields))
