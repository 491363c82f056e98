"""What a selection does to a step: its peak and the seconds it adds (docs/recompute.md, "Budgets").

The native model does the work, in time about linear in ops and replayed ops; `tests/oracles`
says the same the slow way.
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
    """Bytes as requested; seconds of a whole step, which makes `StepGraph.passes` passes."""

    peak_bytes: int
    peak_row: int
    """First op row whose memory, its replays included, is the pass's highest; -1 without ops."""
    added_seconds: float
    replayed_ops: int
    """In one pass."""
    plain_seconds: float
    """All ops of the step's passes, nothing replayed."""

    @property
    def added_fraction(self) -> float:
        return self.added_seconds / self.plain_seconds if self.plain_seconds else 0.0


@dataclass(frozen=True)
class Profile:
    """One evaluation in detail, of one pass."""

    peak_bytes: int
    """Of the whole step."""
    peak_row: int
    seconds: float
    replayed_ops: int
    row_bytes: I64
    """The most alive at each op row and in the replays before it, `base_bytes` included."""
    group_seconds: F64
    """Of each group's replay, by group number."""


@dataclass(frozen=True)
class SearchSettings:
    """How `Evaluator.search` searches."""

    budget_bytes: int
    """Of the pass's peak; `base_bytes` or less searches for the least peak."""
    drops: Sequence[int]
    """Values that may be dropped, and kept again."""
    holds: Sequence[int]
    byte_price: float
    """Seconds that a byte above the budget costs while annealing."""
    start_temperature: float
    """Seconds."""
    end_temperature: float
    iterations: int
    deadline_seconds: float
    """Processor seconds of this process, from the call on."""
    seed: int = 0


class Evaluator:
    """Judges many selections of one graph. Calls from several threads take turns.

    `background`: bytes at each op row beside the graph's own, in this pass.
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
        """`group[v]`: the number of the group that value v is dropped in, in [0, values), or -1;
        `held[v]`: 1 for a held value. Raises ValueError for values that cannot be either."""
        rows = np.empty(len(self.graph), dtype=np.int64)
        seconds = np.empty(len(self.graph.values), dtype=np.float64)
        peak, row, added, replayed = self._model.evaluate(group, held, rows, seconds)
        rows += self.graph.base_bytes
        whole = max(self.graph.rest_peak_bytes, self.graph.base_bytes + peak)
        return Profile(whole, row, added, replayed, rows, seconds)

    def search(self, start: Selection, settings: SearchSettings) -> Selection:
        """Simulated annealing from `start`, then single changes until none helps: the fewest bytes
        above the budget, then the fewest seconds. Only what `drops` and `holds` name changes.
        Raises ValueError for values that cannot be dropped or held."""
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
        """Raises ValueError for a selection that says what cannot be."""
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
    """One selection; an `Evaluator` is quicker for many."""
    return Evaluator(graph).evaluate(selection)


def to_arrays(graph: StepGraph, selection: Selection) -> tuple[I32, U8]:
    """What `Evaluator.profile` takes."""
    group = np.full(len(graph.values), -1, dtype=np.int32)
    for number, members in enumerate(filter(None, selection.groups)):
        group[list(members)] = number
    held = np.zeros(len(graph.values), dtype=np.uint8)
    held[list(selection.held)] = 1
    return group, held


def from_arrays(group: I32, held: U8) -> Selection:
    """The inverse of `to_arrays`; groups in order of their numbers."""
    members: dict[int, list[int]] = {}
    for value in np.flatnonzero(group >= 0).tolist():
        members.setdefault(int(group[value]), []).append(value)
    return Selection(
        groups=tuple(frozenset(members[number]) for number in sorted(members)),
        held=frozenset(np.flatnonzero(held).tolist()),
    )
