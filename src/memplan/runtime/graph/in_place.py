"""Operators in place again.

Functionalization makes each operator write new memory. Where its first operand is all of a storage
that the graph made and nobody needs afterwards, its in-place twin computes the same bits there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memplan.runtime.graph.dependencies import is_barrier
from memplan.runtime.graph.program import Program, facts_of, program_of

_ELEMENT_BY_ELEMENT = frozenset({"index_put", "masked_fill", "masked_scatter", "scatter_add"})
"""Beside those that PyTorch tags as pointwise: they copy their operand and then write into it."""


def in_place(program: Program) -> Program:
    """The same graph, changed, with operators in place wherever that is allowed."""
    graph = program.graph_module.graph
    last = _last_uses(program)
    same: dict[int, int] = {}
    """Storages that are no longer made, and what stands in for them."""
    inputs = set(program.inputs)
    others_own = 0
    """Storages below this may be read once more by who runs backward a second time."""
    for place, node in enumerate(list(graph.nodes)):
        if is_barrier(node):
            others_own = 1 + max(facts_of(node).makes, default=others_own - 1)
        twin = _twin(node)
        if twin is None:
            continue
        into = node.args[0]
        if not isinstance(into, fx.Node) or not _lies_as(node, into):
            continue
        (made,) = facts_of(node).makes
        shown = facts_of(into).shows
        if shown is None or shown in inputs or into.op == "get_attr":
            continue
        others = [one for one in node.all_input_nodes if one is not into]
        if any(facts_of(one).shows == shown for one in others) or _count(node, into) != 1:
            continue
        target = _end(shown, same)
        if (
            target < others_own
            or last[target] > place
            or program.storages[shown].bytes != program.storages[made].bytes
        ):
            continue
        node.target = twin
        node.meta["val"] = into.meta["val"]
        node.replace_all_uses_with(into, delete_user_cb=lambda user, node=node: user is not node)
        same[made] = target
        last[target] = last.get(made, place)
    return program_of(program.graph_module, program.held) if same else program


def _twin(node: fx.Node) -> Any:
    """The operator in place that does what a node's does; None where there is none."""
    twin = twin_of(node.target)
    if twin is None or node.kwargs.get("dtype"):
        return None
    return twin if len(facts_of(node).makes) == 1 and not facts_of(node).chains else None


def twin_of(target: Any) -> Any:
    """The operator in place that computes the same bits as this one does in new memory, where that
    is as large and of the same dtype; None where there is none."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    if torch.Tag.pointwise not in target.tags and name not in _ELEMENT_BY_ELEMENT:
        return None
    packet = getattr(torch.ops.aten, f"{name}_", None)
    twin: Any = getattr(packet, target._overloadname, None) if packet is not None else None
    if twin is None:
        return None
    of = [(one.name, str(one.type)) for one in target._schema.arguments]
    if of != [(one.name, str(one.type)) for one in twin._schema.arguments]:
        return None
    writes = [
        one.alias_info is not None and one.alias_info.is_write for one in twin._schema.arguments
    ]
    return twin if writes and writes[0] and not any(writes[1:]) else None


def _lies_as(node: fx.Node, into: fx.Node) -> bool:
    """Whether a result lies as the operand does, which is all of its storage."""
    result, operand = node.meta.get("val"), into.meta.get("val")
    if not isinstance(result, torch.Tensor) or not isinstance(operand, torch.Tensor):
        return False
    return (
        result.dtype == operand.dtype
        and (result.device == operand.device or "meta" in (result.device.type, operand.device.type))
        and result.shape == operand.shape
        and result.stride() == operand.stride()
        and operand.storage_offset() == 0
        and operand.is_conj() == result.is_conj()
        and operand.is_neg() == result.is_neg()
    )


def _count(node: fx.Node, needed: fx.Node) -> int:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found.count(needed)


def _last_uses(program: Program) -> dict[int, int]:
    """The place of the last node that needs each storage."""
    last: dict[int, int] = {}
    for place, node in enumerate(program.graph_module.graph.nodes):
        if node.op == "output":
            shown = (facts_of(one).shows for one in node.all_input_nodes)
            last.update({index: place for index in shown if index is not None})
        else:
            facts = facts_of(node)
            if not facts.free:
                last.update(dict.fromkeys((*facts.makes, *facts.reads, *facts.writes), place))
    return last


def _end(index: int, same: dict[int, int]) -> int:
    while index in same:
        index = same[index]
    return index
