"""Checkpointing as users write it: a chain of units cut into segments.

All with `torch.utils.checkpoint.checkpoint(use_reentrant=False)`. A cut is a list of segments, half
open on the units: what a segment computes is dropped and recomputed when it is checkpointed.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from bench.recompute.case import State, Training, Unit


@dataclass(frozen=True)
class Segment:
    start: int
    stop: int
    checkpointed: bool


Cut = list[Segment]


def sequential(units: int, segments: int) -> Cut:
    """The cut of `torch.utils.checkpoint.checkpoint_sequential`: equal counts of units, what is
    left over goes to the last segment, and the last is not checkpointed."""
    size = units // segments
    starts = [size * at for at in range(segments)]
    stops = [*starts[1:], units]
    last = segments - 1
    return [Segment(a, b, at < last) for at, (a, b) in enumerate(zip(starts, stops, strict=True))]


def sqrt_n(units: int) -> Cut:
    """Chen et al. 2016: about √n segments of equal counts, every one of them recomputed."""
    segments = max(1, round(math.sqrt(units)))
    edges = [units * at // segments for at in range(segments + 1)]
    return [Segment(a, b, True) for a, b in itertools.pairwise(edges)]


def per_block(training: Training) -> Cut:
    """Every block that users would wrap recomputed by itself, the rest kept."""
    return [Segment(at, at + 1, at in training.blocks) for at in range(len(training.units))]


def step(training: Training, cut: Cut) -> torch.Tensor:
    """Forward and backward through the units with the segments of `cut` checkpointed; the loss."""
    value = training.loss(_forward(training, cut))
    value.backward()
    return value.detach()


def _forward(training: Training, cut: Cut) -> torch.Tensor:
    state = training.inputs
    for segment in cut:
        units = training.units[segment.start : segment.stop]
        if segment.checkpointed:
            state = _checkpointed(units, state)
        else:
            for unit in units:
                state = _apply(unit, state)
    return state[0]


def _checkpointed(units: Sequence[Unit], state: State) -> State:
    def run(*state: torch.Tensor) -> State:
        for unit in units:
            state = _apply(unit, state)
        return state

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inputs without gradients: the first segment's images
        return checkpoint(run, *state, use_reentrant=False)  # type: ignore[no-any-return]


def _apply(unit: Unit, state: State) -> State:
    out = unit(*state)
    return out if isinstance(out, tuple) else (out,)
