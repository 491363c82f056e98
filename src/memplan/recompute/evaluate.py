"""Evaluates a selection: the step's peak and the seconds that it adds (docs/recompute.md,
"Budgets").

The native model needs time about linear in ops and replayed ops. `tests/oracles` has a slow version
to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan._native import RecomputeModel
from memplan.recompute.selection import Selection, check_selection, replayable_ops
from memplan.types.step_graph import F64, StepGraph
from memplan.types.trace import I32, I64, U8


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. Bytes are requested ones; seconds are those of a whole step of
    `StepGraph.passes` passes."""

    peak_bytes: int
    peak_row: int
    """The first row with the highest memory of the pass, replays included; -1 without ops."""
    added_seconds: float
    replayed_ops: int
    """Number of ops that run again in one pass."""
    plain_seconds: float
    """Seconds of all ops of the step's passes without replays."""

    @property
    def added_fraction(self) -> float:
        return self.added_seconds / self.plain_seconds if self.plain_seconds else 0.0


@dataclass(frozen=True)
class Profile:
    """The details of an evaluation, for one pass."""

    peak_bytes: int
    """The peak of the whole step."""
    peak_row: int
    seconds: float
    replayed_ops: int
    row_bytes: I64
    """The most bytes alive at each row and in the replays right before it, with `base_bytes`."""
    group_seconds: F64
    """Seconds of each group's replay, by group number."""


@dataclass(frozen=True)
class SearchSettings:
    """How `Evaluator.search` searches."""

    budget_bytes: int
    """Limit for the pass's peak; `base_bytes` or less asks for the lowest peak."""
    drops: Sequence[int]
    """Values that the search may drop or keep."""
    holds: Sequence[int]
    byte_price: float
    """Seconds that a byte above the budget costs while annealing."""
    start_temperature: float
    """In seconds of added time."""
    end_temperature: float
    iterations: int
    deadline_seconds: float
    """Processor seconds of this process from the beginning of the call."""
    seed: int = 0


class Evaluator:
    """Evaluates many selections of one graph. Calls from several threads run one after the other.

    `background`: further bytes at each row of this pass, beside the graph's own.
    """

    def __init__(self, graph: StepGraph, background: I64 | None = None) -> None:
        graph.check()
        self.graph = graph
        ops, values = graph.ops, graph.values
        self._model = RecomputeModel(
            np.ascontiguousarray(ops.reads_start, dtype=np.int64),
            np.ascontiguousarray(ops.reads, dtype=np.int64),
            np.ascontiguousarray(ops.writes_start, dtype=np.int64),
            np.ascontiguousarray(ops.writes, dtype=np.int64),
            np.ascontiguousarray(ops.seconds, dtype=np.float64),
            replayable_ops(graph).astype(np.uint8),
            np.ascontiguousarray(values.bytes, dtype=np.int64),
            np.ascontiguousarray(values.alloc, dtype=np.int64),
            np.ascontiguousarray(values.free, dtype=np.int64),
            values.droppable.astype(np.uint8),
            graph.forward_ops,
            np.zeros(len(graph), dtype=np.int64) if background is None else background,
            graph.others,
        )
        self.plain_seconds = graph.plain_seconds

    def profile(self, group: npt.NDArray[np.int32], held: U8) -> Profile:
        """Evaluate a selection given as arrays. `group[v]`: the number in [0, values) of the group
        in which value v is dropped, or -1; `held[v]`: 1 for a held value. Raises ValueError for
        values that cannot be dropped or held."""
        rows = np.empty(len(self.graph), dtype=np.int64)
        seconds = np.empty(len(self.graph.values), dtype=np.float64)
        peak, row, added, replayed = self._model.evaluate(group, held, rows, seconds)
        rows += self.graph.base_bytes
        whole = max(self.graph.rest_peak_bytes, self.graph.base_bytes + peak)
        return Profile(whole, row, added, replayed, rows, seconds)

    def search(self, start: Selection, settings: SearchSettings) -> Selection:
        """Simulated annealing from `start`, then single changes until none is an improvement. The
        objective is the bytes above the budget, then the seconds. Only the values in `drops` and
        `holds` change. Raises ValueError for values that cannot be dropped or held."""
        group, held = to_arrays(self.graph, start)
        self._model.search(
            np.asarray(sorted(settings.drops), dtype=np.int32),
            np.asarray(sorted(settings.holds), dtype=np.int32),
            group,
            held,
            settings.budget_bytes - self.graph.base_bytes,
            settings.byte_price,
            settings.start_temperature,
            settings.end_temperature,
            settings.iterations,
            settings.seed,
            settings.deadline_seconds,
        )
        return from_arrays(group, held)

    def evaluate(self, selection: Selection) -> Evaluation:
        """Evaluate a selection. Raises ValueError for one that is not valid."""
        check_selection(self.graph, selection)
        profile = self.profile(*to_arrays(self.graph, selection))
        return Evaluation(
            peak_bytes=profile.peak_bytes,
            peak_row=profile.peak_row,
            added_seconds=profile.seconds * self.graph.passes,
            replayed_ops=profile.replayed_ops,
            plain_seconds=self.plain_seconds,
        )


def evaluate(graph: StepGraph, selection: Selection) -> Evaluation:
    """Evaluate one selection; an `Evaluator` is quicker for many."""
    return Evaluator(graph).evaluate(selection)


def to_arrays(graph: StepGraph, selection: Selection) -> tuple[I32, U8]:
    """A selection as the arrays that `Evaluator.profile` takes."""
    group = np.full(len(graph.values), -1, dtype=np.int32)
    for number, members in enumerate(filter(None, selection.groups)):
        group[list(members)] = number
    held = np.zeros(len(graph.values), dtype=np.uint8)
    held[list(selection.held)] = 1
    return group, held


def from_arrays(group: I32, held: U8) -> Selection:
    """The inverse of `to_arrays`, with groups in the order of their numbers."""
    members: dict[int, list[int]] = {}
    for value in np.flatnonzero(group >= 0).tolist():
        members.setdefault(int(group[value]), []).append(value)
    return Selection(
        groups=tuple(frozenset(members[number]) for number in sorted(members)),
        held=frozenset(np.flatnonzero(held).tolist()),
    )
