"""Places weight updates where they do not raise the peak: an order to start from, without a search.

A weight update is a branch of the step: it can run anywhere after its gradient, frees the gradient,
and needs temporaries of the gradient's size. If it runs early, the gradient is freed early, but the
temporaries add to the activations, which are many at that time. So (ROAM, Shu et al. 2023) an
update runs as soon as its gradient is computed, unless its temporaries would exceed the peak so
far; then it waits until they no longer do. A branch that allocates more than it frees goes to the
end of the step: the counter of a batch norm is a new tensor, and would be held during every later
operator.

Branches are found by their form: connected operators that few others depend on.
"""

from __future__ import annotations

import heapq

import numpy as np

from memplan.types.graph import Graph
from memplan.types.trace import I64

MOST_AFTER = 32
"""The most operators that may depend on an operator of a branch."""


def early_updates(graph: Graph, order: I64) -> I64:
    """`order`, with each branch moved to the first place where it does not exceed the peak so far;
    to the end if there is none."""
    branch_of = _branches(graph)
    members: dict[int, list[int]] = {}
    for op in order[branch_of[order] >= 0].tolist():
        members.setdefault(int(branch_of[op]), []).append(op)
    waits, waiting = _needs(graph, branch_of, members)
    step = _Step(graph)
    pending: list[tuple[int, int]] = []
    at_the_end: list[int] = []

    def ready(branch: int) -> None:
        takes, leaves = step.takes(members[branch])
        if leaves > 0:
            at_the_end.append(branch)
        else:
            heapq.heappush(pending, (takes, branch))

    for branch, count in waits.items():
        if not count:
            ready(branch)
    for op in order[branch_of[order] < 0].tolist():
        limit = max(step.most, step.now + step.takes([op])[0])  # of the running peak after this one
        while pending and step.now + pending[0][0] <= limit:
            step.run(members[heapq.heappop(pending)[1]])
        step.run([op])
        for branch in waiting.get(op, ()):
            waits[branch] -= 1
            if not waits[branch]:
                ready(branch)
    for branch in (*(branch for _, branch in sorted(pending)), *at_the_end):
        step.run(members[branch])
    return np.array(step.order, np.int64)


def _branches(graph: Graph) -> I64:
    """The number of each operator's branch; -1 for an operator that many others depend on."""
    count = len(graph)
    after: list[set[int] | None] = [set() for _ in range(count)]
    for op in reversed(range(count)):
        mine = after[op]
        for needed in graph.before_of(op).tolist():
            known = after[needed]
            if known is not None and mine is not None:
                known |= mine | {op}
            if known is None or mine is None or len(known) > MOST_AFTER:
                after[needed] = None
    root = list(range(count))

    def find(op: int) -> int:
        while root[op] != op:
            root[op] = root[root[op]]
            op = root[op]
        return op

    for op in range(count):
        for needed in graph.before_of(op).tolist():
            if after[op] is not None and after[needed] is not None:
                root[find(op)] = find(needed)
    return np.array([find(op) if after[op] is not None else -1 for op in range(count)], np.int64)


def _needs(
    graph: Graph, branch_of: I64, members: dict[int, list[int]]
) -> tuple[dict[int, int], dict[int, list[int]]]:
    """For each branch, the number of operators outside of branches that it depends on; and for each
    such operator, the branches that depend on it."""
    waits: dict[int, int] = {}
    waiting: dict[int, list[int]] = {}
    for branch, ops in members.items():
        needed = {n for op in ops for n in graph.before_of(op).tolist() if branch_of[n] < 0}
        waits[branch] = len(needed)
        for op in needed:
            waiting.setdefault(op, []).append(branch)
    return waits, waiting


class _Step:
    """The step as far as it has run, with the bytes alive."""

    def __init__(self, graph: Graph) -> None:
        self._uses: list[list[int]] = [[] for _ in range(len(graph))]
        self._left = np.diff(graph.users_start).tolist()
        for value in range(graph.values):
            for op in graph.users_of(value).tolist():
                self._uses[op].append(value)
        self._makes: list[list[int]] = [[] for _ in range(len(graph))]
        for value in np.flatnonzero(graph.maker >= 0).tolist():
            self._makes[graph.maker[value]].append(value)
        self._bytes = graph.bytes.tolist()
        self._lasts = graph.lasts.tolist()
        self._scratch = graph.scratch.tolist()
        there = (graph.maker < 0) & (graph.lasts | (np.diff(graph.users_start) > 0))
        self.now = graph.base_bytes + int(graph.bytes[there].sum())
        self.most = self.now
        self.order: list[int] = []

    def run(self, ops: list[int]) -> None:
        for op in ops:
            self.most = max(self.most, self._begin(op))
            self._end(op)
            self.order.append(op)

    def takes(self, ops: list[int]) -> tuple[int, int]:
        """The most bytes that `ops` need beyond those alive now, and the change that they leave."""
        before, most = self.now, self.now
        for op in ops:
            most = max(most, self._begin(op))
            self._end(op)
        for op in ops:
            for value in self._uses[op]:
                self._left[value] += 1
        leaves, self.now = self.now - before, before
        return most - before, leaves

    def _begin(self, op: int) -> int:
        """Allocate the operator's results. Returns the bytes held while it runs."""
        self.now += sum(self._bytes[value] for value in self._makes[op])
        return int(self.now + self._scratch[op])

    def _end(self, op: int) -> None:
        for value in self._makes[op]:
            if not self._left[value] and not self._lasts[value]:
                self.now -= self._bytes[value]
        for value in self._uses[op]:
            self._left[value] -= 1
            if not self._left[value] and not self._lasts[value]:
                self.now -= self._bytes[value]
