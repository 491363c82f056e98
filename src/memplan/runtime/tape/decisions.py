"""A plan's recompute part, looked up by op."""

from __future__ import annotations

from typing import Any, Final

from memplan.types.op_names import op_name
from memplan.types.plan import OpOutput, RecomputePart

HOLD: Final = ""
"""In place of a group's name: keep the value though autograd does not save it."""


class Decisions:
    """What to do with the values of one call of a root module."""

    def __init__(self, choices: dict[str, dict[int, dict[int, str]]]) -> None:
        self._choices = choices
        self.named = sum(len(o) for by_nth in choices.values() for o in by_nth.values())
        """How many values the plan names in this call."""
        self._by_op: dict[Any, dict[int, dict[int, str]]] = {}

    def of(self, func: Any, nth: int) -> dict[int, str] | None:
        """By output of the `nth` op of this kind: a group's name or HOLD; None: keep them all."""
        by_nth = self._by_op.get(func)
        if by_nth is None:
            by_nth = self._by_op[func] = self._choices.get(op_name(func), {})
        return by_nth.get(nth)


def decisions_by_call(part: RecomputePart) -> dict[int, Decisions]:
    """One for each call that the plan knows."""
    calls: dict[int, dict[str, dict[int, dict[int, str]]]] = {}

    def add(place: OpOutput, choice: str) -> None:
        by_name = calls.setdefault(place.call, {})
        by_name.setdefault(place.op, {}).setdefault(place.nth, {})[place.output] = choice

    for place in part.hold:
        add(place, HOLD)
    names: set[str] = set()
    for number, group in enumerate(part.groups):
        name = group.name or "values"
        name = name if name not in names else f"{name} (group {number})"
        names.add(name)
        for place in group.drop:
            add(place, name)
    return {call: Decisions(choices) for call, choices in calls.items()}
