"""A `Selection`: which values of a `StepGraph` are dropped after forward, and in which groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from memplan.types.plan import OpOutput, RecomputeGroup, RecomputePart
from memplan.types.step_graph import Bools, StepGraph


@dataclass(frozen=True)
class Selection:
    """Value numbers of a `StepGraph`. A group is recomputed as a whole, right before the first
    backward op that reads one of its values. `held` values would be freed in forward; each is kept
    until the last group that needs it has been recomputed."""

    groups: tuple[frozenset[int], ...] = ()
    held: frozenset[int] = frozenset()

    @property
    def dropped(self) -> frozenset[int]:
        return frozenset().union(*self.groups)


def check_selection(graph: StepGraph, selection: Selection) -> None:
    """Raise ValueError for a selection that is not valid."""
    count, droppable, alloc = len(graph.values), graph.values.droppable, graph.values.alloc
    seen: set[int] = set()
    for group in selection.groups:
        if twice := seen & group:
            raise ValueError(f"value {min(twice)} is dropped in two groups")
        seen |= group
    dropped = sorted(seen)
    if dropped and not (0 <= dropped[0] <= dropped[-1] < count and droppable[dropped].all()):
        wrong = next(v for v in dropped if not (0 <= v < count and droppable[v]))
        raise ValueError(f"value {wrong} cannot be dropped")
    for value in selection.held:
        if not 0 <= value < count or not 0 <= alloc[value] < graph.forward_ops or value in seen:
            raise ValueError(f"value {value} cannot be held")


def as_followed(graphs: list[StepGraph], selections: list[Selection]) -> list[Selection]:
    """What a run drops in each kind of pass (`StepGraph.kinds`): what the kind's own selection
    drops, and what those of others name in calls up to which both kinds call the same roots."""
    if len(graphs) == 1:
        return selections
    places = [
        {_place(graph, kind, v): v for v in np.flatnonzero(graph.values.droppable).tolist()}
        for graph, kind in zip(graphs, graphs[0].kinds, strict=True)
    ]
    followed = []
    for own, values in zip(selections, places, strict=True):
        groups, dropped = list(own.groups), set(own.dropped)
        for other, theirs in zip(selections, places, strict=True):
            same = {value: values[place] for place, value in theirs.items() if place in values}
            for group in other.groups if other is not own else ():
                more = frozenset(same[value] for value in group if value in same) - dropped
                groups += [more] if more else []
                dropped |= more
        followed.append(Selection(tuple(groups), own.held - dropped))
    return followed


def _place(graph: StepGraph, kind: tuple[str, ...], value: int) -> tuple[object, ...]:
    """The roots that a pass of this kind has called up to the op that makes the value; the op."""
    made = op_output(graph, value)
    return kind[: made.call - graph.calls_before + 1], made.op, made.nth, made.output


def replayable_ops(graph: StepGraph) -> Bools:
    """Which ops a replay may run: those inside a recorded call with the same result each time."""
    return np.asarray(graph.ops.replayable & (graph.ops.call >= 0), dtype=np.bool_)


def to_part(
    graph: StepGraph,
    selection: Selection,
    *,
    budget_bytes: int,
    peak_bytes: int,
    added_seconds: float,
) -> RecomputePart:
    """The selection as part of a plan, which does not refer to the graph. `peak_bytes` and
    `added_seconds` are its promise, from an `Evaluation`. Raises ValueError for values that no op
    inside a call makes."""
    check_selection(graph, selection)
    groups = [sorted(group) for group in selection.groups if group]
    unsaved = {v for v in graph.between if graph.values.free[v] <= graph.forward_ops}
    held = selection.held | unsaved if groups else selection.held

    def inside(value: int) -> bool:
        """Whether an op inside a call made the value. How others are made is not recorded."""
        return bool(graph.ops.call[graph.values.alloc[value]] >= 0)

    names = _unique([_common_module(graph, group) for group in groups])
    return RecomputePart(
        groups=[
            RecomputeGroup(name=name, drop=[op_output(graph, value) for value in group])
            for name, group in zip(names, groups, strict=True)
        ],
        hold=[op_output(graph, value) for value in sorted(held) if inside(value)],
        kinds=[list(kind) for kind in graph.kinds],
        calls=int(graph.ops.call.max()) + 1 if graph.others else 0,
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        added_seconds=added_seconds,
    )


def op_output(graph: StepGraph, value: int) -> OpOutput:
    """A value's name in a plan. Raises ValueError for one that no op inside a call allocates."""
    row = int(graph.values.alloc[value])
    if row < 0 or graph.ops.call[row] < 0 or value not in (made := _made_by(graph, row)):
        raise ValueError(f"value {value} is made by no op that a plan can name")
    ops = graph.ops
    call = graph.calls_before + int(ops.call[row])
    return OpOutput(op=ops.name[row], nth=int(ops.nth[row]), output=made.index(value), call=call)


def _made_by(graph: StepGraph, row: int) -> list[int]:
    return sorted(v for v in graph.ops.writes_of(row) if graph.values.alloc[v] == row)


def _common_module(graph: StepGraph, group: list[int]) -> str:
    """The longest common path of the modules that made the values of a group."""
    paths = [graph.ops.module[int(graph.values.alloc[value])].split(".") for value in group]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _unique(names: Iterable[str]) -> list[str]:
    """Names with `#1`, `#2`, … appended where one occurs again; `recompute` for an empty name."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        name = name or "recompute"
        result.append(f"{name}#{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return result
