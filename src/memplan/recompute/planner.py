"""The candidates for every budget of one graph, and their improvement.

`evaluate` judges every candidate. The baselines and the plans of the chain of blocks, for every
memory level, serve all budgets. For one budget, the best of them is improved by annealing over
single values; on graphs that are not too large, CP-SAT's choice is another start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from memplan.recompute.baselines import BytesPerSecond, equal_segments
from memplan.recompute.blocks import Block, blocks_of
from memplan.recompute.bounds import Bounds
from memplan.recompute.cut import least_peak_chain
from memplan.recompute.evaluate import Evaluation, Evaluator, SearchSettings
from memplan.recompute.keep_set import KeepSetProblem
from memplan.recompute.options import BlockOptions, judge, options_of
from memplan.recompute.segments import Chain, SegmentTable, every_unsaved_input
from memplan.recompute.selection import Selection
from memplan.types.deadline import Deadline
from memplan.types.step_graph import StepGraph

SMALL = 128
"""Graphs with at most so many droppable values are annealed from several starts."""
LONGER = 4
"""On large graphs, each round has so many times the annealing steps of the round before."""
WORTH = 1e-3
"""A round is worth its time if it saves at least this fraction."""
STALE, SMALL_STALE = 1, 2
"""The search ends after so many rounds in a row that were not worth their time."""
BLOCK_VALUES = (1, 6)
"""The fewest large values of a block, for a chain of many blocks and for one of fewer."""
FIRST_STEPS = 100
"""Number of steps of each ladder that are evaluated before any budget is known."""
LOOK_AROUND = 6
PRICE = 64.0
"""While annealing, all droppable bytes above the budget cost so many times the time of forward."""
LEAST_PRICE = 1000.0
"""The factor by which they cost more when the lowest peak is searched for."""
HEAT, SMALL_HEAT = 0.3, (0.1, 0.5, 2.0)
"""Start temperature in units of forward's time: to be divided by the number of droppable values;
for small graphs by restart."""
KEEP_SET_MOST = 1000
"""CP-SAT is only used for graphs with at most so many droppable values."""
KEEP_SET_EFFORT, SMALL_KEEP_SET_EFFORT = 1.0, 3.0
KEEP_SET_ROWS = 4
"""CP-SAT's deterministic time for one call, and the number of calls for one budget."""
PROVED = 1e-4
"""A candidate within this fraction of the bound counts as optimal."""


@dataclass(frozen=True)
class Candidate:
    selection: Selection
    evaluation: Evaluation

    @property
    def peak(self) -> int:
        return self.evaluation.peak_bytes

    @property
    def seconds(self) -> float:
        return self.evaluation.added_seconds


class Planner:
    """Finds selections of one graph. Candidates for one budget also serve later ones."""

    def __init__(
        self, graph: StepGraph, deadline: Deadline, keep_set_effort: float | None = None
    ) -> None:
        """`keep_set_effort`: CP-SAT's deterministic time for one call."""
        self.evaluator = Evaluator(graph)
        self.graph = graph
        self.bounds = Bounds(graph)
        self.drops = np.flatnonzero(graph.values.droppable).tolist()
        self.small = len(self.drops) <= SMALL
        usual = SMALL_KEEP_SET_EFFORT if self.small else KEEP_SET_EFFORT
        self.keep_set_effort = usual if keep_set_effort is None else keep_set_effort
        self.holds: list[int] = []
        self.candidates: list[Candidate] = []
        self.ladders: list[_Ladder] = []
        asked = len(self.drops) <= KEEP_SET_MOST and not graph.others
        self.keep_sets = KeepSetProblem(graph) if asked else None
        self.proved: list[tuple[int, float]] = []
        """Budgets, each with a lower bound for the seconds that a selection adds to a step."""
        [self.plain] = self.add([Selection()])
        if self.drops and not deadline.passed:
            self._prepare(deadline)

    def _prepare(self, deadline: Deadline) -> None:
        self.add([least_peak_chain(self.graph)])
        cuts: list[list[int]] = []
        for least_values in BLOCK_VALUES:
            blocks = blocks_of(self.graph, least_values)
            if [block.start for block in blocks] in cuts or deadline.passed:
                continue
            cuts.append([block.start for block in blocks])
            chain = Chain(self.graph, blocks, [])
            self.holds = self.holds or self._holdable(sorted(every_unsaved_input(chain)))
            self.add(equal_segments(chain, n) for n in range(1, len(blocks) + 1))
            greedy = BytesPerSecond(chain)
            self._climb(len(greedy), partial(_all_but, greedy), deadline)
            chain.options.extend(_options(blocks, deadline))
            if not deadline.passed:
                table = SegmentTable(chain)
                levels = table.steps()
                self._climb(len(levels), partial(_plan, table, levels), deadline)

    def _climb(self, steps: int, make: Callable[[int], Selection], deadline: Deadline) -> None:
        self.ladders.append(_Ladder(self, steps, make, deadline))

    def _holdable(self, boundary: list[int]) -> list[int]:
        """Values that the search may hold: all in a small graph, else those between blocks."""
        values, forward = self.graph.values, self.graph.forward_ops
        made = (values.alloc >= 0) & (values.alloc < forward) & (values.bytes > 0)
        unread = self.graph.touches.last_backward < 0
        every = np.flatnonzero(made & ~values.droppable & unread).tolist()
        return every if len(every) <= 2 * SMALL else boundary

    def add(self, selections: Iterable[Selection]) -> list[Candidate]:
        """Evaluate selections and add them to the candidates."""
        added = [Candidate(s, self.evaluator.evaluate(s)) for s in selections]
        self.candidates += added
        return added

    def best(self, budget_bytes: int) -> Candidate | None:
        """The quickest candidate within a budget; of equals the one with the lower peak."""
        within = [c for c in self.candidates if c.peak <= budget_bytes]
        return min(within, key=lambda c: (c.seconds, c.peak), default=None)

    def lowest(self) -> Candidate:
        return min(self.candidates, key=lambda c: (c.peak, c.seconds))

    def least_seconds(self, budget_bytes: int) -> float:
        """A proven lower bound for the seconds that a selection within a budget adds to a step."""
        known = [seconds for budget, seconds in self.proved if budget >= budget_bytes]
        return max([self.bounds.least_seconds(budget_bytes), *known])

    def improve(
        self, budget_bytes: int, deadline: Deadline, effort: int, restarts: int = 1, rounds: int = 1
    ) -> None:
        """Search for better selections within a budget, until rounds bring no improvement or the
        deadline comes, and add them to the candidates. `effort`: annealing steps in the first
        round, for each droppable value and start. Small graphs have four starts in a round, plus
        `restarts`."""
        least = self.bounds.least_peak
        if not self.drops or self.plain.peak <= budget_bytes:
            return
        if budget_bytes < least == self.lowest().peak:
            return
        for ladder in self.ladders:
            ladder.look(budget_bytes, deadline)
        if self.small or rounds > 1:
            self._propose(budget_bytes, deadline)
        stale, start_number, longer = 0, -1, 1 if self.small else LONGER
        for number in range(rounds):
            before = self._best_or_lowest(budget_bytes)
            for start in self._starts(budget_bytes, restarts):
                if deadline.passed or self._is_proved(budget_bytes):
                    return
                start_number += 1
                self._anneal(start, budget_bytes, deadline, effort * longer**number, start_number)
            after = self._best_or_lowest(budget_bytes)
            fitted = before.peak <= budget_bytes
            saved = before.seconds - after.seconds if fitted else before.peak - after.peak
            worth = saved > WORTH * (before.seconds if fitted else before.peak)
            stale = 0 if worth else stale + 1
            if stale == (SMALL_STALE if self.small else STALE):
                return

    def _propose(self, budget_bytes: int, deadline: Deadline) -> None:
        """Add CP-SAT's proposals and its bound. Each call constrains one more row, the one with the
        proposal's peak, until the proposal is within the budget or only its replays exceed it."""
        if self.keep_sets is None or budget_bytes < self.bounds.least_peak:
            return
        rows = [int(self.bounds.plain.argmax())]
        for _ in range(KEEP_SET_ROWS):
            share = deadline.part(3)
            if share.passed or self._is_proved(budget_bytes):
                return
            answer = self.keep_sets.choose(
                budget_bytes,
                rows,
                effort=self.keep_set_effort,
                deadline_seconds=share.left(),
                hint=self._best_or_lowest(budget_bytes).selection,
            )
            self.proved.append((budget_bytes, answer.bound * self.graph.passes))
            judged = self.add(answer.proposals)
            lowest = min(judged, key=lambda candidate: candidate.peak, default=None)
            if lowest is None or lowest.peak <= budget_bytes:
                return
            if lowest.evaluation.peak_row in rows:
                return
            rows.append(lowest.evaluation.peak_row)

    def _is_proved(self, budget_bytes: int) -> bool:
        best = self.best(budget_bytes)
        return best is not None and best.seconds * (1 - PROVED) <= self.least_seconds(budget_bytes)

    def _best_or_lowest(self, budget_bytes: int) -> Candidate:
        return self.best(budget_bytes) or self.lowest()

    def _starts(self, budget_bytes: int, restarts: int) -> Iterator[Candidate]:
        best = self._best_or_lowest(budget_bytes)
        yield best
        above = [c for c in self.candidates if c.peak > budget_bytes and c.seconds < best.seconds]
        near = sorted(above, key=lambda c: c.peak - budget_bytes)
        yield from near[:1]
        if self.small:
            yield self.plain
            yield from near[1:2]
            for restart in range(restarts):
                yield self.plain if restart % 3 == 1 else self._best_or_lowest(budget_bytes)

    def _anneal(
        self, start: Candidate, budget_bytes: int, deadline: Deadline, effort: int, seed: int
    ) -> None:
        forward = float(self.graph.ops.seconds[: self.graph.forward_ops].sum()) or 1e-9
        size = int(self.graph.values.bytes[self.drops].sum()) or 1
        bound = self.bounds.least_peak
        heat = SMALL_HEAT[seed % len(SMALL_HEAT)] if self.small else HEAT / len(self.drops)
        dearer = LEAST_PRICE if budget_bytes < bound else 1.0
        settings = SearchSettings(
            budget_bytes=max(budget_bytes, bound),
            drops=self.drops,
            holds=self.holds,
            byte_price=PRICE * dearer * forward / size,
            start_temperature=heat * forward * dearer,
            end_temperature=heat * forward * dearer * 1e-3,
            iterations=effort * len(self.drops),
            deadline_seconds=deadline.left(),
            seed=seed,
        )
        self.add([self.evaluator.search(start.selection, settings)])


def _all_but(greedy: BytesPerSecond, step: int) -> Selection:
    return greedy.first(len(greedy) - step)


def _plan(table: SegmentTable, levels: list[int], step: int) -> Selection:
    return table.plan(levels[step])


class _Ladder:
    """Selections in the order of mostly rising peak and falling time, evaluated when needed."""

    def __init__(
        self, planner: Planner, steps: int, make: Callable[[int], Selection], deadline: Deadline
    ) -> None:
        self.planner = planner
        self.steps = steps
        self.make = make
        self.judged: dict[int, Candidate] = {}
        for step in range(0, steps, max(1, steps // FIRST_STEPS)):
            if not deadline.passed:
                self._judge(step)

    def _judge(self, step: int) -> Candidate:
        if step not in self.judged:
            [self.judged[step]] = self.planner.add([self.make(step)])
        return self.judged[step]

    def look(self, budget_bytes: int, deadline: Deadline) -> None:
        """Find the highest step within a budget by bisection, then evaluate those above it."""
        low = max((s for s, c in self.judged.items() if c.peak <= budget_bytes), default=-1)
        high = min((s for s in self.judged if s > low), default=self.steps)
        while high - low > 1 and not deadline.passed:
            middle = (low + high) // 2
            fits = self._judge(middle).peak <= budget_bytes
            low, high = (middle, high) if fits else (low, middle)
        for step in range(low + 1, min(low + 1 + LOOK_AROUND, self.steps)):
            if not deadline.passed:
                self._judge(step)


def _options(blocks: list[Block], deadline: Deadline) -> list[BlockOptions]:
    """Options of all blocks, in at most a quarter of the time. Equal blocks share one search."""
    distinct = {block.signature: block for block in blocks}
    each = deadline.part(5 * len(distinct), 2.0).left()
    found = {name: options_of(block, each) for name, block in distinct.items()}
    return [judge(block, found[block.signature]) for block in blocks]
