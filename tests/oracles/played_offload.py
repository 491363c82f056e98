"""The figures of a plan that recomputes and offloads, played op by op and copy by copy.

It shares no code with `transfers`: memory is that of the slow machine of selections, less what is
away at a row; the clocks go forward one op at a time.
"""

from __future__ import annotations

from memplan.recompute.transfers import OffloadPlan
from memplan.types.step_graph import StepGraph
from tests.oracles.played_selection import _Machine


def play(graph: StepGraph, plan: OffloadPlan, bytes_per_second: float) -> tuple[int, float]:
    """Peak bytes of the step and the seconds that the plan adds to it."""
    player = _Player(graph, plan, bytes_per_second)
    plain = float(graph.ops.seconds.sum())
    return player.peak(), (player.clock - plain) * graph.passes


class _Player:
    def __init__(self, graph: StepGraph, plan: OffloadPlan, rate: float) -> None:
        self.graph, self.plan, self.rate = graph, plan, rate
        self.machine = _Machine(graph, plan.selection)
        self.clock = 0.0
        self.out_free = self.back_free = 0.0
        self.out_done: dict[int, float] = {}
        self.back_done: dict[int, float] = {}
        self.on_card: list[int] = []
        self.away: dict[int, range] = {}
        self.left: dict[int, int] = {}
        self.forward()
        self.wanted = self.wishes()
        self.backward()

    def size(self, value: int) -> int:
        return int(self.graph.values.bytes[value])

    def saved_at(self, value: int) -> int:
        """The first op that reads it and takes time, after the last that writes it."""
        rows = range(self.graph.forward_ops)
        last = max(row for row in rows if value in self.machine.writes[row])
        for row in rows:
            reads = value in self.machine.reads[row]
            if row > last and reads and self.graph.ops.seconds[row] > 0:
                return row
        return last

    def forward(self) -> None:
        moments: dict[int, list[int]] = {}
        for value in sorted(self.plan.offloaded):
            moments.setdefault(self.saved_at(value), []).append(value)
        for row in range(self.graph.forward_ops):
            self.clock += float(self.graph.ops.seconds[row])
            for value in moments.get(row, []):
                self.out_free = max(self.out_free, self.clock) + self.size(value) / self.rate
                self.out_done[value] = self.out_free
                self.on_card.append(value)
                while sum(map(self.size, self.on_card[1:])) > self.plan.out_bytes:
                    oldest = self.on_card.pop(0)
                    self.clock = max(self.clock, self.out_done[oldest])
                    touched = [
                        r
                        for r in range(self.graph.forward_ops)
                        if oldest in self.machine.reads[r] | self.machine.writes[r]
                    ]
                    self.left[oldest] = max(row, *touched) + 1

    def groups_before(self, there: set[int], row: int) -> list[tuple[list[int], list[int]]]:
        """Rows of each replay before a row, and what it asks for, in order."""
        found = []
        for group in self.machine._triggered(row):
            members = {value for value in group if self.machine._uses(value)}
            rows = sorted(self.machine._closure(members, frozenset(there).__contains__))
            asked: list[int] = []
            for op in rows:
                asked += sorted(self.machine._wants(op) & there - set(asked))
            there |= members
            found.append((rows, asked))
        return found

    def wishes(self) -> list[tuple[int, list[int], list[int]]]:
        """By backward row and replay: values asked for, then the rows that run again; the row's own
        come last."""
        there = set(self.machine.kept)
        steps = []
        for row in range(self.graph.forward_ops, len(self.graph)):
            for rows, asked in self.groups_before(there, row):
                steps.append((row, self.offloaded(asked), rows))
            own = sorted(self.machine._touch(row))
            steps.append((row, self.offloaded(own), []))
        seen: set[int] = set()
        result = []
        for row, values, rows in steps:
            result.append((row, [v for v in values if v not in seen], rows))
            seen |= set(values)
        return result

    def offloaded(self, values: list[int]) -> list[int]:
        return sorted(value for value in values if value in self.plan.offloaded)

    def begin(self, value: int, row: int) -> None:
        ready = max(self.back_free, self.clock, self.out_done[value])
        self.back_free = ready + self.size(value) / self.rate
        self.back_done[value] = self.back_free
        self.away[value] = range(self.left[value], row)

    def backward(self) -> None:
        line = [value for _, values, _ in self.wanted for value in values]
        for place, (row, values, rows) in enumerate(self.wanted):
            begins = self.clock
            for value in values:
                # All of them are asked for when the op, or the replay, begins.
                if value in self.left and value not in self.back_done:
                    self.begin(value, row)
                room = self.plan.ahead_bytes
                for other in line[line.index(value) + 1 :]:
                    if other not in self.left:
                        continue
                    room -= self.size(other)
                    if room < 0:
                        break
                    if other not in self.back_done:
                        self.begin(other, row)
                self.clock = max(self.clock, self.back_done.get(value, begins))
            self.clock += sum(float(self.graph.ops.seconds[op]) for op in rows)
            last = place + 1 == len(self.wanted) or self.wanted[place + 1][0] != row
            if last:
                self.clock += float(self.graph.ops.seconds[row])

    def peak(self) -> int:
        self.machine.run()
        memory = self.machine.memory
        for value, rows in self.away.items():
            for row in rows:
                memory[row] -= self.size(value)
        return max(self.graph.rest_peak_bytes, self.graph.base_bytes + max(memory, default=0))
