"""What a selection does, as levers that a person can read."""

from __future__ import annotations

import re
from collections import defaultdict

from memplan.fit.answer import Lever
from memplan.recompute.evaluate import Evaluator, to_arrays
from memplan.recompute.selection import Selection
from memplan.types.plan import RecomputePart


def recompute_levers(
    evaluator: Evaluator, selection: Selection, part: RecomputePart
) -> list[Lever]:
    """The groups of a selection, named as in its part of the plan; those of like modules together
    (`h.0.mlp` and `h.1.mlp` are `h.*.mlp`), most bytes first."""
    graph = evaluator.graph
    groups = [sorted(group) for group in selection.groups if group]
    profile = evaluator.profile(*to_arrays(graph, selection))
    folded: dict[str, list[int]] = defaultdict(list)
    for number, group in enumerate(part.groups[: len(groups)]):
        folded[_like(group.name)].append(number)
    levers = []
    for name, numbers in folded.items():
        values = [value for number in numbers for value in groups[number]]
        seconds = float(profile.group_seconds[numbers].sum()) * graph.passes
        levers.append(
            Lever(
                kind="recompute",
                name=name,
                groups=len(numbers),
                values=len(values),
                saved_bytes=int(graph.values.bytes[values].sum()),
                added_seconds=seconds,
                added_fraction=seconds / evaluator.plain_seconds if evaluator.plain_seconds else 0,
            )
        )
    return sorted(levers, key=lambda lever: -lever.saved_bytes)


def _like(name: str) -> str:
    """`encoder.layer.3#1` is like `encoder.layer.0`."""
    parts = name.partition("#")[0].split(".")
    return ".".join("*" if re.fullmatch(r"\d+", part) else part for part in parts)
