"""Turns operators of a functional graph into their in-place variants.

Functionalization makes each operator allocate its result. Where the first operand fills a storage
of the graph that nothing needs afterwards, the in-place variant computes the same bits there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from memplan.runtime.graph.operator_graph import is_barrier
from memplan.runtime.graph.program import Program, facts_of, program_of

_ELEMENT_BY_ELEMENT = frozenset({"index_put", "masked_fill", "masked_scatter", "scatter_add"})
"""Further operators beside those that PyTorch tags as pointwise: they copy their first operand and
write into the copy."""


def in_place(program: Program, spare: Collection[fx.Node] = ()) -> Program:
    """Change the program's graph to in-place operators wherever the bits stay the same. `spare`:
    inputs whose memory may be used for something else."""
    graph = program.graph_module.graph
    last = _last_uses(program)
    same: dict[int, int] = {}
    """Storages that are no longer allocated, and the storages that take their place."""
    inputs = set(program.inputs) - {facts_of(node).storage for node in spare}
    before_barrier = 0
    """Storages below this index existed before the last barrier: the caller may run backward a
    second time, which reads them again."""
    for place, node in enumerate(list(graph.nodes)):
        if is_barrier(node):
            before_barrier = 1 + max(facts_of(node).makes, default=before_barrier - 1)
        variant = _variant_of(node)
        if variant is None:
            continue
        into = node.args[0]
        if not isinstance(into, fx.Node) or not _same_layout(node, into):
            continue
        (made,) = facts_of(node).makes
        shown = facts_of(into).storage
        if shown is None or shown in inputs or into.op == "get_attr":
            continue
        target = _end(shown, same)
        others = (facts_of(one).storage for one in node.all_input_nodes if one is not into)
        shared = any(one is not None and _end(one, same) == target for one in others)
        if (
            shared
            or _count(node, into) != 1
            or target < before_barrier
            or last[target] > place
            or program.storages[shown].bytes != program.storages[made].bytes
        ):
            continue
        node.target = variant
        node.meta["val"] = into.meta["val"]
        node.replace_all_uses_with(into, delete_user_cb=lambda user, node=node: user is not node)
        same[made] = target
        last[target] = last.get(made, place)
    return program_of(program.graph_module, program.held) if same else program


def _variant_of(node: fx.Node) -> Any:
    """The in-place variant of a node's operator; None where there is none."""
    variant = in_place_variant(node.target)
    if variant is None or node.kwargs.get("dtype"):
        return None
    return variant if len(facts_of(node).makes) == 1 and not facts_of(node).chains else None


def in_place_variant(target: Any) -> Any:
    """The in-place variant that computes the same bits as this operator, provided that result and
    first operand have the same size and dtype; None where there is none."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    if torch.Tag.pointwise not in target.tags and name not in _ELEMENT_BY_ELEMENT:
        return None
    packet = getattr(torch.ops.aten, f"{name}_", None)
    variant: Any = getattr(packet, target._overloadname, None) if packet is not None else None
    if variant is None:
        return None
    of = [(one.name, str(one.type)) for one in target._schema.arguments]
    if of != [(one.name, str(one.type)) for one in variant._schema.arguments]:
        return None
    writes = [
        one.alias_info is not None and one.alias_info.is_write for one in variant._schema.arguments
    ]
    return variant if writes and writes[0] and not any(writes[1:]) else None


def _same_layout(node: fx.Node, into: fx.Node) -> bool:
    """Whether a result has the layout of an operand that starts its storage."""
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
    """The number of the last node that needs each storage."""
    last: dict[int, int] = {}
    for place, node in enumerate(program.graph_module.graph.nodes):
        if node.op == "output":
            shown = (facts_of(one).storage for one in node.all_input_nodes)
            last.update({index: place for index in shown if index is not None})
        else:
            facts = facts_of(node)
            if not facts.no_kernel:
                last.update(dict.fromkeys((*facts.makes, *facts.reads, *facts.writes), place))
    return last


def _end(index: int, same: dict[int, int]) -> int:
    while index in same:
        index = same[index]
    return index
