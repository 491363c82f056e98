"""Undoes what recording itself changes about a step: additions that PyTorch does in place.

Where gradients meet, and where `linear` adds its bias, PyTorch adds into memory of its own; under
any dispatch mode it asks for new memory (`can_accumulate_inplace` in `autograd/input_buffer.cpp`,
`native/Linear.cpp`). The graph adds in place wherever nothing needs the operand afterwards: the
same sums, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from memplan.runtime.compiled.program import FACTS, Facts, Geometry, StorageFacts, facts_of

ADD, ADD_INTO = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_PRODUCT = torch.ops.aten._unsafe_view.default
"""The last op of `matmul`."""
GEOMETRY = "memplan_geometry"
"""Key in `node.meta` of a tensor's `Geometry`."""


def add_in_place(graph: fx.Graph, storages: list[StorageFacts]) -> None:
    """Rewrites additions into ones in place; the graph has its output already."""
    last = _last_uses(graph)
    same: dict[int, int] = {}
    """Storages that are no longer made, and what stands in for them."""
    for place, node in enumerate(list(graph.nodes)):
        if same and FACTS in node.meta:
            node.meta[FACTS] = _renamed(facts_of(node), same)
        if node.target is not ADD:
            continue
        into = node.args[0]
        if not isinstance(into, fx.Node) or not _fits(node, into, storages):
            continue
        facts, target = facts_of(node), facts_of(into).shows
        assert target is not None
        if last[target] > place or facts.uses.count(target) != 1 or _shares(node, target):
            continue
        (made,) = facts.makes
        node.target = ADD_INTO
        node.meta[FACTS] = replace(facts, makes=(), writes=(target,), shows=target)
        node.replace_all_uses_with(into, delete_user_cb=lambda user, node=node: user is not node)
        same[made] = target
        last[target] = last.get(made, place)


def _fits(node: fx.Node, into: fx.Node, storages: list[StorageFacts]) -> bool:
    """Whether the sum lies as its first operand does, which is all of a storage of the step's."""
    if not facts_of(node).backward and into.target is not _PRODUCT:
        return False
    sum_, operand = node.meta.get(GEOMETRY), into.meta.get(GEOMETRY)
    if not isinstance(sum_, Geometry) or sum_ != operand or len(facts_of(node).makes) != 1:
        return False
    target = facts_of(into).shows
    if target is None or storages[target].maker.op == "placeholder":
        return False
    return storages[target].bytes == storages[facts_of(node).makes[0]].bytes


def _shares(node: fx.Node, target: int) -> bool:
    """Whether the other operand is on the same storage."""
    other = node.args[1]
    return isinstance(other, fx.Node) and facts_of(other).shows == target


def _last_uses(graph: fx.Graph) -> dict[int, int]:
    """The place of the last node that needs each storage."""
    last: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        if node.op == "output":
            for result in node.all_input_nodes:
                shown = facts_of(result).shows
                if shown is not None:
                    last[shown] = place
        else:
            facts = facts_of(node)
            last.update(dict.fromkeys((*facts.makes, *facts.uses, *facts.writes), place))
    return last


def _renamed(facts: Facts, same: dict[int, int]) -> Facts:
    def of(indices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(_end(index, same) for index in indices))

    shows = None if facts.shows is None else _end(facts.shows, same)
    return replace(
        facts,
        reads=of(facts.reads),
        writes=of(facts.writes),
        uses=of(facts.uses),
        shows=shows,
    )


def _end(index: int, same: dict[int, int]) -> int:
    while index in same:
        index = same[index]
    return index
