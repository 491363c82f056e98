"""The least added time within a budget when values may be kept, recomputed or sent to the host.

The recompute solver gives selections for the budget and for larger ones. For each of them, kept
values are offloaded until the peak is within the budget. Then the recompute solver is called again
with what the best of these plans offload. Small graphs are annealed over all three choices.
`transfers` judges every plan; plans that only recompute are among the candidates.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from memplan.recompute.planner import PROVED, Planner
from memplan.recompute.selection import Selection, op_output
from memplan.recompute.transfers import (
    Judged,
    OffloadPlan,
    Saves,
    Schedule,
    without_offloaded,
)
from memplan.types.deadline import Deadline
from memplan.types.plan import OffloadPart
from memplan.types.step_graph import StepGraph
from memplan.types.trace import I64

SMALL = 24
"""All three choices are annealed for at most so many values that can be offloaded."""
LEVELS = (0.0, 0.6, 0.9, 0.3, 0.45, 1.2, 2.0)
"""By how much larger budgets are for which the recompute solver is called, as multiples of the
bytes that the link moves during forward."""
EFFORT, SMALL_EFFORT = 4, 400
"""Annealing steps of the recompute solver for each droppable value."""
WINDOWS = ((0, 1), (1, 2), (2, 2), (2, 8), (4, 4), (8, 8))
"""Windows (out, ahead) that are tried, in multiples of the median size of a value."""
SHARES = (0.0, 0.3, 0.6, 0.8, 0.9)
"""Shares of the bytes that stay on the card without recomputation: the cheapest to recompute."""
SEEDS = 2
"""Number of such plans for which the recompute solver is called first."""
HALVINGS = 6
LEAST_BYTES = 1 << 16
"""In large graphs, smaller values are not offloaded."""
MOVES = 2500
"""Annealing steps from one start, and starts, on small graphs."""
STARTS = 4


@dataclass(frozen=True)
class Link:
    """The link between the card and page-locked host memory."""

    bytes_per_second: float
    """In each direction."""
    host_bytes: int | None = None
    """The most host memory that may be used; None for no limit."""


class OffloadSearch:
    """Searches for plans of one graph. Plans found for one budget are candidates for later ones."""

    def __init__(self, graph: StepGraph, link: Link, deadline: Deadline) -> None:
        self.graph, self.link, self.deadline = graph, link, deadline
        self.saves = Saves(graph, link.bytes_per_second)
        self.small = len(self.saves.values) <= SMALL
        size = graph.values.bytes[self.saves.values]
        self.unit = _median(size)
        least = 0 if self.small else min(LEAST_BYTES, self.unit)
        self.values = [v for v in self.saves.values if self.saves.bytes[v] >= least]
        self.most = math.inf if link.host_bytes is None else link.host_bytes
        self.prices = _prices(graph)
        self.planner = Planner(graph, deadline.part(3))
        self.found: list[Judged] = []
        self.bound = 0.0
        self._schedules: dict[Selection, Schedule] = {}
        self.schedule(Selection())

    def within(self, budget_bytes: int) -> Judged | None:
        """The plan within a budget that adds the least time; None if none was found."""
        self.bound = self.planner.bounds.least_seconds(budget_bytes, self.link.bytes_per_second)
        for schedule in self._levels(budget_bytes):
            self._improve(schedule, budget_bytes)
            if self._is_proved(best := self.best(budget_bytes)):
                return best
        for seed in (self.best(budget_bytes), *self._without_waiting(budget_bytes)):
            if seed is not None and seed.away and not self.deadline.passed:
                self._again(seed, budget_bytes)
        if self.small and self.values and not self._is_proved(self.best(budget_bytes)):
            self._anneal(budget_bytes)
        return self.best(budget_bytes)

    def _is_proved(self, best: Judged | None) -> bool:
        return best is not None and best.added_seconds * (1 - PROVED) <= self.bound

    def best(self, budget_bytes: int) -> Judged | None:
        within = [one for one in self.found if one.peak_bytes <= budget_bytes]
        return min(within, key=_cost, default=None)

    def lowest(self) -> Judged:
        """The plan with the lowest peak so far; of equals, the quickest."""
        return min(self.found, key=lambda one: (one.peak_bytes, *_cost(one)))

    def schedule(self, selection: Selection) -> Schedule:
        """The schedule of a selection. The selection without offloading becomes a candidate."""
        if selection not in self._schedules:
            made = self._schedules[selection] = Schedule(self.saves, selection)
            self.try_(made, frozenset(), 0, 0)
        return self._schedules[selection]

    def try_(self, schedule: Schedule, offloaded: frozenset[int], out: int, ahead: int) -> Judged:
        judged = schedule.judge(offloaded, out, ahead)
        if judged.host_bytes <= self.most:
            self.found.append(judged)
            return judged
        return replace(judged, peak_bytes=1 << 62)

    def _levels(self, budget_bytes: int) -> Iterator[Schedule]:
        """Selections for the budget, for larger ones (`LEVELS`), and the one that drops nothing."""
        forward = float(self.graph.ops.seconds[: self.graph.forward_ops].sum())
        free = min(forward * self.link.bytes_per_second, self.most)
        plain = self.planner.plain.peak
        budgets = [int(budget_bytes + level * free) for level in LEVELS]
        seen = set()
        for number, budget in enumerate([*budgets, plain]):
            share = self.deadline.part(2 + len(LEVELS) - number if number else 3)
            effort = SMALL_EFFORT if self.planner.small else EFFORT
            self.planner.improve(budget, share, effort, rounds=1 if number else 3)
            found = self.planner.best(budget) or self.planner.lowest()
            if found.selection not in seen and not self.deadline.passed:
                seen.add(found.selection)
                yield self.schedule(found.selection)

    def _without_waiting(self, budget_bytes: int) -> list[Judged]:
        """Plans that only offload, values that are costliest to recompute first. Those come first
        that save the most recomputation."""
        plain = self.schedule(Selection())
        kept = self._helpful(plain, budget_bytes)
        found: dict[frozenset[int], Judged] = {}
        for out, ahead in self._windows():
            for top in self._tops(kept):
                slack = out / self.link.bytes_per_second
                chosen = self._spread(plain, top, slack, self._largest_share(top))
                if chosen not in found:
                    found[chosen] = self.try_(plain, chosen, out, ahead)

        def spared(one: Judged) -> float:
            gone = [value for value, _, _ in one.away]
            return sum(self.prices[v] * self.saves.bytes[v] for v in gone) - one.stall_seconds

        return sorted(found.values(), key=spared, reverse=True)[:SEEDS]

    def _fill(self, schedule: Schedule, budget_bytes: int) -> None:
        """Offload values that the selection keeps, until the peak is within the budget."""
        kept = self._helpful(schedule, budget_bytes)
        tops = self._tops(kept)
        every = self._spread(schedule, kept, math.inf, self._largest_share(kept))
        if self.try_(schedule, every, 0, 0).peak_bytes > budget_bytes:
            return
        for windows in self._windows():
            for top in tops:
                for slack in (windows[0] / self.link.bytes_per_second, math.inf):
                    if self.deadline.passed:
                        return
                    self._thin(schedule, top, slack, windows, budget_bytes)
        best = self.best(budget_bytes)
        if best is not None and best.plan.selection == schedule.selection:
            self._trim(schedule, best, budget_bytes)

    def _windows(self) -> list[tuple[int, int]]:
        return [(out * self.unit, ahead * self.unit) for out, ahead in WINDOWS]

    def _helpful(self, schedule: Schedule, budget_bytes: int) -> list[int]:
        """Kept values that could be on the host at some row above the budget."""
        above = np.append(0, np.cumsum(schedule.row_bytes > budget_bytes))
        saves = self.saves
        return [
            value
            for value, ask in ((v, schedule.asks.get(v)) for v in self.values)
            if ask and above[max(saves.row[value], saves.last_forward[value]) + 1] < above[ask.row]
        ]

    def _tops(self, kept: list[int]) -> list[list[int]]:
        """Sets of values without those that are cheapest to recompute (`SHARES`), each in the order
        in which autograd saves them; the largest set first."""
        order = sorted(kept, key=lambda value: self.prices[value])
        sums = np.cumsum([self.saves.bytes[value] for value in order])
        tops = []
        for share in SHARES:
            cut = int(np.searchsorted(sums, share * sums[-1])) if len(order) else 0
            dear = set(order[cut:])
            tops.append([value for value in kept if value in dear])
        return [top for place, top in enumerate(tops) if top and top not in tops[:place]]

    def _thin(
        self,
        schedule: Schedule,
        values: list[int],
        slack: float,
        windows: tuple[int, int],
        budget: int,
    ) -> None:
        """Offload as few of the values as possible, spread evenly, so that the peak is within the
        budget. Values whose copies would be late by more than `slack` seconds are left out."""
        low, high = 0.0, self._largest_share(values)
        for number in range(HALVINGS + 1):
            share = high if number == 0 else (low + high) / 2
            chosen = self._spread(schedule, values, slack, share)
            judged = self.try_(schedule, chosen, *windows)
            best = self.best(budget)
            if judged.peak_bytes <= budget:
                high = share
            else:
                low = share
                hopeless = best and judged.added_seconds > best.added_seconds
                if number == 0 or hopeless:
                    return

    def _largest_share(self, values: list[int]) -> float:
        """The largest share of the values' bytes that the host has room for."""
        return min(1.0, self.most / max(1, sum(self.saves.bytes[value] for value in values)))

    def _spread(
        self, schedule: Schedule, values: list[int], slack: float, share: float
    ) -> frozenset[int]:
        """A share of the values, spread evenly over their order, without those whose copies to the
        host or back would be late by more than `slack` seconds."""
        saves, link, before, chosen = self.saves, 0.0, 0, 0
        result = []
        for value in values:
            now = saves.ends[saves.row[value]]
            before += saves.bytes[value]
            if chosen + saves.bytes[value] <= share * before and link - now <= slack:
                chosen += saves.bytes[value]
                link = max(link, now) + saves.copy_seconds[value]
                result.append(value)
        if slack == math.inf:
            return frozenset(result)
        link = saves.ends[self.graph.forward_ops - 1]
        in_time = []
        for value in schedule.order(result):
            if link + saves.copy_seconds[value] - schedule.asks[value].seconds <= slack:
                link += saves.copy_seconds[value]
                in_time.append(value)
        return frozenset(in_time)

    def _trim(self, schedule: Schedule, best: Judged, budget_bytes: int) -> None:
        """Remove offloaded values while the peak stays within the budget, and change the windows,
        as long as that saves time or host memory."""
        for value in sorted(best.plan.offloaded, key=lambda v: -self.saves.bytes[v]):
            if self.deadline.passed:
                return
            plan = best.plan
            judged = self.try_(schedule, plan.offloaded - {value}, plan.out_bytes, plan.ahead_bytes)
            if judged.peak_bytes <= budget_bytes and _cost(judged) <= _cost(best):
                best = judged
        for out in (0, 1, 2, 4, 8):
            for ahead in (0, 1, 2, 4, 8):
                if not self.deadline.passed:
                    self.try_(schedule, best.plan.offloaded, out * self.unit, ahead * self.unit)

    def _again(self, best: Judged, budget_bytes: int) -> None:
        """Call the recompute solver with the offloaded values given, and offload more if needed."""
        graph = without_offloaded(self.graph, best)
        share = self.deadline.part(2)
        planner = Planner(graph, share)
        effort = SMALL_EFFORT if planner.small else EFFORT
        planner.improve(budget_bytes, share, effort, rounds=2)
        found = planner.best(budget_bytes) or planner.lowest()
        count = len(self.graph.values)
        held = frozenset(value for value in found.selection.held if value < count)
        schedule = self.schedule(replace(found.selection, held=held))
        self.try_(schedule, best.plan.offloaded, best.plan.out_bytes, best.plan.ahead_bytes)
        self._improve(schedule, budget_bytes)

    def _improve(self, schedule: Schedule, budget_bytes: int) -> None:
        """Offload until the budget is kept, unless recomputation alone takes longer than the
        best."""
        best = self.best(budget_bytes)
        if best is None or schedule.replay_seconds * self.graph.passes < best.added_seconds:
            self._fill(schedule, budget_bytes)

    def _anneal(self, budget_bytes: int) -> None:
        """Simulated annealing over all three choices, for small graphs."""
        forward = float(self.graph.ops.seconds[: self.graph.forward_ops].sum()) or 1e-9
        size = sum(self.saves.bytes[value] for value in self.values) or 1
        for seed in range(STARTS):
            rng = random.Random(seed)
            current = self.best(budget_bytes) or self.lowest()

            def energy(one: Judged) -> float:
                over = max(0, one.peak_bytes - budget_bytes)
                return one.added_seconds / self.graph.passes + 64 * forward * over / size

            for move in range(MOVES):
                if self.deadline.passed:
                    return
                heat = 0.1 * forward * 1e-3 ** (move / MOVES)
                other = self._moved(rng, current.plan)
                more = energy(other) - energy(current)
                if more <= 0 or rng.random() < math.exp(-more / heat):
                    current = other

    def _moved(self, rng: random.Random, plan: OffloadPlan) -> Judged:
        offloaded, out, ahead = plan.offloaded, plan.out_bytes, plan.ahead_bytes
        groups, held = [set(group) for group in plan.selection.groups], plan.selection.held
        if self.planner.holds and rng.random() < 0.1:
            held = held ^ {rng.choice(self.planner.holds)}
        elif rng.random() < 0.25:
            order = rng.sample(self.values, rng.randint(0, min(3, len(self.values))))
            window = sum(self.saves.bytes[value] for value in order)
            if rng.random() < 0.5:
                out = window
            else:
                ahead = window
        else:
            for value in rng.sample(self.values, min(rng.choice([1, 1, 2]), len(self.values))):
                offloaded = offloaded - {value}
                for group in groups:
                    group.discard(value)
                choice = rng.randrange(4 if self.graph.values.droppable[value] else 2)
                if choice == 1:
                    offloaded = offloaded | {value}
                elif choice == 2:
                    groups.append({value})
                elif choice == 3 and groups:
                    rng.choice(groups).add(value)
        selection = Selection(tuple(frozenset(g) for g in groups if g), held)
        return self.try_(self.schedule(_sorted(selection)), offloaded, out, ahead)


def to_offload_part(graph: StepGraph, judged: Judged, link: Link) -> OffloadPart:
    """The offloaded values as part of a plan. Raises ValueError for values that it cannot name."""
    saves = Saves(graph, link.bytes_per_second)
    order = Schedule(saves, judged.plan.selection).order(judged.plan.offloaded)
    return OffloadPart(
        values=[op_output(graph, value) for value in order],
        out_bytes=judged.plan.out_bytes,
        ahead_bytes=judged.plan.ahead_bytes,
        host_bytes=judged.host_bytes,
        peak_bytes=judged.peak_bytes,
        added_seconds=judged.stall_seconds,
    )


def _cost(one: Judged) -> tuple[float, int, int]:
    return one.added_seconds, one.host_bytes, one.peak_bytes


def _sorted(selection: Selection) -> Selection:
    return replace(selection, groups=tuple(sorted(selection.groups, key=min)))


def _median(size: I64) -> int:
    """The size up to which values have half of the bytes; 0 without values."""
    size = np.sort(size)
    half = np.searchsorted(np.cumsum(size), size.sum() / 2)
    return int(size[half]) if len(size) else 0


def _prices(graph: StepGraph) -> list[float]:
    """For each value, the seconds of the op that makes it divided by its bytes."""
    made = graph.values.alloc >= 0
    seconds = np.where(made, graph.ops.seconds[np.maximum(graph.values.alloc, 0)], 0.0)
    prices: list[float] = (seconds / np.maximum(graph.values.bytes, 1)).tolist()
    return prices
