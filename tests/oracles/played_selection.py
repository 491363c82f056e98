"""The figures of a selection by the slowest, most obvious state machine.

It shares no code with `evaluate`: the step is played op by op over a bag of live copies, closures
are found by recursion, and nothing is remembered between them. Tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memplan.recompute.selection import Selection, check_selection
from memplan.types.step_graph import StepGraph


@dataclass(frozen=True)
class SlowEvaluation:
    """As in `evaluate.Evaluation`."""

    peak_bytes: int
    peak_row: int
    added_seconds: float
    replayed_ops: int


def evaluate_slowly(graph: StepGraph, selection: Selection) -> SlowEvaluation:
    """Play the step under the selection. Raises ValueError for one that says what cannot be."""
    check_selection(graph, selection)
    return _Machine(graph, selection).run()


class _Machine:
    def __init__(self, graph: StepGraph, selection: Selection) -> None:
        self.graph = graph
        self.group_of = {v: g for g in selection.groups for v in g}
        self.alive: set[int] = set()
        self.materialised: set[int] = set()
        self.seconds = 0.0
        self.replayed = 0
        self.memory = [0] * len(graph)
        values = range(len(graph.values))
        self.reads = [set(graph.ops.reads_of(row)) for row in range(len(graph))]
        self.writes = [
            set(graph.ops.writes_of(row)) | {v for v in values if graph.values.alloc[v] == row}
            for row in range(len(graph))
        ]
        self.kept = {v for v in values if self._is_kept(v, selection)}
        self.needed_until = self._needed_until(selection)

    def _is_kept(self, value: int, selection: Selection) -> bool:
        values, forward = self.graph.values, self.graph.forward_ops
        if value in self.group_of:
            return False
        makers = [row for row in range(forward) if value in self.writes[row]]
        again = 0 <= values.alloc[value] < forward and all(
            self.graph.ops.replayable[row] and self.graph.ops.call[row] >= 0 for row in makers
        )
        return not again or bool(self._uses(value)) or value in selection.held

    def _uses(self, value: int) -> list[int]:
        return [
            row
            for row in range(self.graph.forward_ops, len(self.graph))
            if value in self.reads[row] | self.writes[row]
        ]

    def _needed_until(self, selection: Selection) -> dict[int, int]:
        """Last row whose replay begins with a value that is kept or was recomputed before."""
        result: dict[int, int] = {}
        there = set(self.kept)
        for row in range(self.graph.forward_ops, len(self.graph)):
            for group in self._triggered(row):
                members = {v for v in group if self._uses(v)}
                for op in self._closure(members, frozenset(there).__contains__):
                    for source in self._wants(op) & there:
                        result[source] = row
                there |= members
        return result

    def _triggered(self, row: int) -> list[frozenset[int]]:
        """The groups that a backward op is the first to read from, in the order it reads."""
        groups: list[frozenset[int]] = []
        for value in (*self.graph.ops.reads_of(row), *self.graph.ops.writes_of(row)):
            group = self.group_of.get(value, frozenset())
            firsts = [self._uses(v)[0] for v in group if self._uses(v)]
            if firsts and min(firsts) == row and group not in groups:
                groups.append(group)
        return groups

    def _wants(self, row: int) -> set[int]:
        """What must be there before a forward op runs."""
        changed = {v for v in self.writes[row] if self.graph.values.alloc[v] != row}
        return self.reads[row] | changed

    def _closure(self, targets: set[int], there: Callable[[int], bool]) -> set[int]:
        """Forward rows that make the targets out of what is there."""
        rows: set[int] = set()
        seen: set[tuple[int, int]] = set()

        def make(value: int, before: int) -> None:
            if (value, before) in seen:
                return
            seen.add((value, before))
            for row in range(before):
                if value in self.writes[row]:
                    rows.add(row)
                    for wanted in self._wants(row):
                        if not there(wanted):
                            make(wanted, row)

        for target in targets:
            make(target, self.graph.forward_ops)
        return rows

    def _bytes(self, values: set[int]) -> int:
        return sum(int(self.graph.values.bytes[v]) for v in values)

    def _see(self, row: int, held: int) -> None:
        self.memory[row] = max(self.memory[row], held)

    def run(self) -> SlowEvaluation:
        values, forward = self.graph.values, self.graph.forward_ops
        self.alive = {v for v in range(len(values)) if values.alloc[v] == -1}
        for row in range(len(self.graph)):
            self.alive = {v for v in self.alive if not self._gone(v, row)}
            self.materialised = {v for v in self.materialised if self._needed_at(v, row)}
            for group in self._triggered(row) if row >= forward else ():
                self._replay(row, group)
            self.alive |= {
                v for v in range(len(values)) if values.alloc[v] == row and not self._gone(v, row)
            }
            self._see(row, self._bytes(self.alive) + self._bytes(self.materialised))
        peak = max(self.memory, default=0)
        elsewhere = self.graph.others * self._kept_more()
        return SlowEvaluation(
            peak_bytes=max(self.graph.rest_peak_bytes, self.graph.base_bytes + peak + elsewhere),
            peak_row=self.memory.index(peak) if self.memory else -1,
            added_seconds=self.seconds * self.graph.passes,
            replayed_ops=self.replayed,
        )

    def _kept_more(self) -> int:
        """What a pass keeps from forward to backward, beyond what it does in the plain run."""
        values, forward = self.graph.values, self.graph.forward_ops
        plain = {v for v in range(len(values)) if values.alloc[v] < forward < values.free[v]}
        kept = {
            v
            for v in range(len(values))
            if values.alloc[v] < forward and self._kept_to(v) > forward
        }
        return self._bytes(kept) - self._bytes(plain)

    def _kept_to(self, value: int) -> int:
        """The row at which a value, as forward made it, is gone."""
        if value in self.group_of:
            return 0
        return max(int(self.graph.values.free[value]), self.needed_until.get(value, -1) + 1)

    def _needed_at(self, value: int, row: int) -> bool:
        return max(*self._uses(value), self.needed_until.get(value, -1)) >= row

    def _gone(self, value: int, row: int) -> bool:
        if value in self.group_of:
            touched = [r for r in range(self.graph.forward_ops) if value in self._touch(r)]
            return row > max(touched)
        return row >= self.graph.values.free[value] and row > self.needed_until.get(value, -1)

    def _touch(self, row: int) -> set[int]:
        return self.reads[row] | self.writes[row]

    def _replay(self, row: int, group: frozenset[int]) -> None:
        members = {v for v in group if self._uses(v)}
        there = self.kept | self.materialised
        rows = sorted(self._closure(members, lambda v: v in there))
        around = self._bytes(self.alive) + self._bytes(self.materialised)
        copies: set[int] = set()
        for place, op in enumerate(rows):
            made = {v for v in self.writes[op] if self.graph.values.alloc[v] == op}
            copies |= made - there
            self._see(row, around + self._bytes(copies) + self._bytes(made & there))
            later = set().union(*(self._touch(r) for r in rows[place + 1 :]))
            copies = {v for v in copies if v in members or v in later}
            self.seconds += float(self.graph.ops.seconds[op])
            self.replayed += 1
        self.materialised |= members
