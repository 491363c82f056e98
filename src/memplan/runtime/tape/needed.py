"""What the replays of a call turned out to need, so that the next call like it records no more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memplan.runtime.tape.groups import Group
from memplan.runtime.tape.replayable import Traits


@dataclass(frozen=True)
class Needed:
    """Of a recorded call. Recording less than a replay needs costs memory and never a result: what
    no recorded op made is kept by whoever reads it."""

    ops: list[Traits]
    """Every op of the call, views aside, in order."""
    replayed: frozenset[int]
    """Places in `ops` of those that lead to dropped values."""
    inputs: int
    """How many values these read that were kept."""

    def is_next(self, place: int, traits: Traits) -> bool:
        """Whether a call like this one has such an op there."""
        return place < len(self.ops) and self.ops[place] is traits


def needed_by(groups: Iterable[Group], ops: list[Traits]) -> Needed:
    """By the dropped values that autograd's graph refers to once the call has returned."""
    stack = [handle.view.value for group in groups for handle in group.handles]
    seen = set(stack)
    replayed: set[int] = set()
    inputs = 0
    while stack:
        value = stack.pop()
        if value.producer is None:
            inputs += 1
            continue
        replayed.add(value.producer.number)
        for item in value.producer.inputs:
            if item not in seen:
                seen.add(item)
                stack.append(item)
    return Needed(ops, frozenset(replayed), inputs)
