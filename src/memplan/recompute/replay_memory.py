"""The most bytes that replaying one sub-model holds beside what is there before it."""

from __future__ import annotations

from memplan.types.step_graph import Bools, StepGraph


def replay_memory(
    graph: StepGraph, rows: tuple[int, int], members: frozenset[int], output: int, there: Bools
) -> tuple[int, int]:
    """Bytes of replaying the forward rows `rows` (first, last): up to the members and `output`, and
    for the members alone, `output` (-1 for none) being there.

    As in `evaluate`: ops that nothing asks for do not run, an op makes all its outputs, members
    stay, the rest goes after its last use. `there`, by value: what the replay finds and need not
    make.
    """
    wanted = members | {output} if output >= 0 else members
    known = there.copy()
    known[list(wanted)] = False
    whole = _peak(graph, rows, wanted, known)
    if output >= 0:
        known[output] = True
    return whole, _peak(graph, rows, members, known)


def _peak(graph: StepGraph, rows: tuple[int, int], targets: frozenset[int], there: Bools) -> int:
    replayed = _needed(graph, rows, targets, there)
    last_use: dict[int, int] = {}
    for row in replayed:
        for value in [*graph.ops.reads_of(row), *graph.ops.writes_of(row)]:
            last_use[value] = row
    nbytes = graph.values.bytes
    held = peak = 0
    copies: set[int] = set()
    for row in replayed:
        again = 0
        for value in graph.ops.writes_of(row):
            if graph.values.alloc[value] != row:
                continue
            if there[value]:
                again += int(nbytes[value])
            else:
                copies.add(value)
                held += int(nbytes[value])
        peak = max(peak, held + again)
        for value in [*graph.ops.reads_of(row), *graph.ops.writes_of(row)]:
            if value in copies and value not in targets and last_use[value] == row:
                copies.remove(value)
                held -= int(nbytes[value])
    return peak


def _needed(
    graph: StepGraph, rows: tuple[int, int], targets: frozenset[int], there: Bools
) -> list[int]:
    """The rows that make the targets out of what is there, in program order."""
    wanted = set(targets)
    found: list[int] = []
    for row in range(rows[1], rows[0] - 1, -1):
        writes = graph.ops.writes_of(row)
        if not any(value in wanted for value in writes):
            continue
        found.append(row)
        changed = [value for value in writes if graph.values.alloc[value] != row]
        wanted.update(v for v in [*graph.ops.reads_of(row), *changed] if not there[v])
    return found[::-1]
