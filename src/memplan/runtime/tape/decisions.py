"""What a plan says of the values of a forward pass, looked up by op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from memplan.runtime.tape.groups import Group
from memplan.runtime.tape.replayable import Traits
from memplan.types.op_names import op_name
from memplan.types.plan import OffloadPart, OpOutput, RecomputePart

HOLD: Final = ""
"""Used in place of a group's name: keep the value although autograd does not save it."""
Choice = str | int
"""The group that a value is dropped with, or its place in the list of offloaded ones."""
Call = int | tuple[str, ...]
"""Its number in a pass, or, in a plan for several kinds of pass, the roots that the pass has called
up to it."""
_Choices = dict[str, dict[int, dict[int, Choice]]]


class Decisions:
    """What to do with the values of one call of a root module."""

    def __init__(self, choices: _Choices, *, moved: int = 0, recomputes: bool = True) -> None:
        """`moved`: how many values the plan drops or offloads in this call. `recomputes`: whether
        it may drop values, of which ops are recorded."""
        self._choices = choices
        self.recomputes = recomputes
        self.moved = moved
        self._by_op: dict[Any, dict[int, dict[int, Choice]]] = {}

    def of(self, func: Any, nth: int) -> Mapping[int, Choice] | None:
        """A choice or HOLD for each output of the `nth` op of this kind; None to keep them all."""
        by_nth = self._by_op.get(func)
        if by_nth is None:
            by_nth = self._by_op[func] = self._choices.get(op_name(func), {})
        return by_nth.get(nth)


def decisions_by_call(
    part: RecomputePart | None, offload: OffloadPart | None = None
) -> dict[Call, Decisions]:
    """One for each call that the plan knows. What both parts name is recomputed; so is what a plan
    drops in one kind of pass of several that have called the same until then."""
    part = part or RecomputePart(groups=[])
    begun: list[Call] = [tuple(kind[: n + 1]) for kind in part.kinds for n in range(len(kind))]
    calls: dict[Call, _Choices] = {}
    moved: dict[Call, dict[int, set[tuple[str, int, int]]]] = {}
    """By call and by its number in the plan, which may have several for one."""

    def add(place: OpOutput, choice: Choice) -> None:
        call = begun[place.call] if place.call < len(begun) else place.call
        by_name = calls.setdefault(call, {})
        by_name.setdefault(place.op, {}).setdefault(place.nth, {})[place.output] = choice
        by_number = moved.setdefault(call, {}).setdefault(place.call, set())
        if choice is not HOLD:
            by_number.add((place.op, place.nth, place.output))

    for number, place in enumerate(offload.values if offload is not None else ()):
        add(place, number)
    for place in part.hold:
        add(place, HOLD)
    names: set[str] = set()
    for number, group in enumerate(part.groups):
        name = group.name or "values"
        name = name if name not in names else f"{name} (group {number})"
        names.add(name)
        for place in group.drop:
            add(place, name)
    recomputes = bool(part.groups)
    return {
        call: Decisions(found, moved=min(map(len, moved[call].values())), recomputes=recomputes)
        for call, found in calls.items()
    }


def is_dropped(choice: Choice) -> bool:
    """Whether it is a group to recompute with."""
    return isinstance(choice, str) and choice is not HOLD


@dataclass(frozen=True)
class Needed:
    """What the replays of a recorded call turned out to need, so that the next call like it records
    no more. Recording less than a replay needs costs memory and never a result: what no recorded op
    made is kept by whoever reads it."""

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
    """What the replays need, from the dropped values in autograd's graph after the call."""
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
