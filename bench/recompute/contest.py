"""One model: every way to lower its peak, measured beside the plain run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from bench.recompute import baselines, models, ours
from bench.recompute.baselines import Cut
from bench.recompute.case import Training
from bench.recompute.summary import REDUCTIONS
from bench.recompute.tracker import Peak, measure

ROUNDS = 7
SEED = 4
ASKED = 0.25
"""Of the step's time, where at most `summary.ADDED` is to be measured: a plan knows what operators
take alone, not what they do to each other's caches."""
SPARSE = 12
"""Longest chain that is not sequential of which every number of segments is tried; of longer ones
a spread of that many."""

Step = Callable[[], torch.Tensor]


@dataclass
class Contestant:
    """A way to run the step: its peak and, where timed, its seconds."""

    method: str
    training: Training
    step: Step
    peak: Peak
    notes: dict[str, Any] = field(default_factory=dict)
    rounds: list[float] = field(default_factory=list)

    def row(self, plain: Contestant) -> dict[str, Any]:
        row = {"method": self.method, **self.notes, **asdict(self.peak)}
        row["peak_bytes"] = self.peak.peak_bytes
        if self.rounds:
            row["seconds"] = min(self.rounds)
            row["added_fraction"] = min(self.rounds) / min(plain.rounds) - 1
        return row


def enter(method: str, training: Training, step: Step, **notes: Any) -> Contestant:
    return Contestant(method, training, step, peak_of(training, step), notes)


def peak_of(training: Training, step: Step) -> Peak:
    """The peaks of a step that begins without gradients."""
    training.module.zero_grad(set_to_none=True)
    return measure(step, training.resident(), training.module.parameters())


def accumulating(training: Training, step: Step) -> Peak:
    """The peaks of a step that adds to gradients that exist: they are resident as well."""
    training.module.zero_grad(set_to_none=True)
    step()
    gradients = [p.grad for p in training.module.parameters() if p.grad is not None]
    return measure(step, [*training.resident(), *gradients])


def segment_counts(units: int, every: bool) -> list[int]:
    """The numbers of segments to try: all of them, or a spread of a long chain's."""
    if every or units <= SPARSE:
        return list(range(2, units + 1))
    half = SPARSE // 2
    spread = {half + round((units - half) * at / half) for at in range(1, half + 1)}
    return sorted({*range(2, half + 1), *spread})


def is_sequential(training: Training) -> bool:
    """Whether the units are modules from one tensor to one, as `nn.Sequential` takes them."""
    return all(isinstance(unit, torch.nn.Module) for unit in training.units)


def cuts(training: Training) -> list[tuple[str, Cut, dict[str, Any]]]:
    """(method, cut, notes) of every baseline but the plain run."""
    units = len(training.units)
    method = "checkpoint_sequential" if is_sequential(training) else "segments"
    found: list[tuple[str, Cut, dict[str, Any]]] = [
        (method, baselines.sequential(units, count), {"segments": count})
        for count in segment_counts(units, is_sequential(training))
    ]
    found.append(("sqrt_n", baselines.sqrt_n(units), {}))
    found.append(("per_block", baselines.per_block(training), {}))
    return found


def enter_baselines(training: Training) -> list[Contestant]:
    """The plain run first, then every baseline, measured but not timed."""
    training.step()  # whatever the first step sets up
    contestants = [enter("plain", training, training.step)]
    for method, cut, notes in cuts(training):
        step = functools.partial(baselines.step, training, cut)
        contestants.append(enter(method, training, step, **notes))
    return contestants


def enter_ours(name: str) -> Contestant:
    """The least peak by memplan, on a copy of its own."""
    training = models.build(name)
    applied = ours.apply(training)
    notes = {"promised_bytes": applied.promised_bytes, "plan_seconds": applied.plan_seconds}
    return enter("memplan", training, training.step, **notes)


def least(contestants: list[Contestant]) -> Contestant:
    return min(contestants, key=lambda one: one.peak.peak_bytes)


def time_together(contestants: list[Contestant], accumulate: bool = False) -> None:
    """A step of each in turn, `ROUNDS` times, in processor seconds of this one thread: waiting for
    others does not count, and what they do to the caches spares the fastest round."""
    for warm in (True, *[False] * ROUNDS):
        for one in contestants:
            if not accumulate:
                one.training.module.zero_grad(set_to_none=True)
            began = time.process_time()
            one.step()
            if not warm:
                one.rounds.append(time.process_time() - began)


def same_bits(plain: Contestant, other: Contestant) -> bool:
    """Whether loss and gradients are the plain run's."""
    found = []
    for one in (plain, other):
        # Running statistics have moved on by different numbers of steps; training ignores them.
        one.training.module.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        loss = one.step()
        found.append([loss, *(p.grad for p in one.training.module.parameters())])
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(*found, strict=True)
    )


def run(name: str) -> dict[str, Any]:
    """Everything about one model, as JSON values."""
    training = models.build(name)
    contestants = enter_baselines(training)
    plain, rivals = contestants[0], contestants[1:]
    counted = [one for one in rivals if "segments" in one.notes]
    named = [one for one in rivals if "segments" not in one.notes]
    timed = [plain, *named, least(counted)]
    mine = enter_ours(name)
    time_together([*timed, mine])
    data: dict[str, Any] = {
        "says": models.CASES[name].says,
        "units": len(training.units),
        "plain": plain.row(plain),
        "best_segments": least(counted).row(plain),
        "sqrt_n": named[0].row(plain),
        "per_block": named[1].row(plain),
        "lowest_baseline_bytes": least([plain, *rivals]).peak.peak_bytes,
        "segment_peaks": {str(one.notes["segments"]): one.peak.peak_bytes for one in counted},
        "accumulating": _accumulating(plain, [least(counted), *named]),
    }
    data["memplan"] = _judged(plain, mine)
    if name in REDUCTIONS:
        data["memplan"] |= _reduction(name, plain)
    return data


def _accumulating(plain: Contestant, rivals: list[Contestant]) -> dict[str, Any]:
    before = accumulating(plain.training, plain.step).beyond_bytes
    after = {one.method: accumulating(one.training, one.step).beyond_bytes for one in rivals}
    return {"plain_bytes": before, "best_baseline_bytes": min(after.values()), "bytes": after}


def _judged(plain: Contestant, mine: Contestant) -> dict[str, Any]:
    row = mine.row(plain)
    measured, promised = mine.peak.peak_bytes, mine.notes["promised_bytes"]
    row["prediction_error"] = abs(promised - measured) / measured
    beyond = mine.peak.beyond_bytes
    row["prediction_error_beyond"] = abs(promised - mine.peak.base_bytes - beyond) / beyond
    row["activation_reduction"] = 1 - mine.peak.activation_bytes / plain.peak.activation_bytes
    row["identical"] = same_bits(plain, mine)
    return row


def _reduction(name: str, plain: Contestant) -> dict[str, Any]:
    """Feng & Huang's way: gradients exist before the step, and when memplan plans for it."""
    training = models.build(name)
    training.step()
    ours.apply(training, most_added=ASKED)
    both = [replace(plain, rounds=[])]
    both.append(Contestant("memplan", training, training.step, plain.peak))
    before, after = (accumulating(one.training, one.step).beyond_bytes for one in both)
    time_together(both, accumulate=True)
    return {
        "accumulating_bytes": after,
        "reduction": 1 - after / before,
        "accumulating_added_fraction": both[1].row(both[0])["added_fraction"],
    }
