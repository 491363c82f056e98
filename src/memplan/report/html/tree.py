"""The peak as a tree: modules, in them operators, in these tensors; each node with its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from memplan.report.text import format_bytes, short_op
from memplan.simulate import Timeline
from memplan.simulate.roles import (
    CATEGORIES,
    derive_roles,
    nameless_bytes,
    paths_below_roots,
    requested_bytes,
)
from memplan.types.estimate import Estimate
from memplan.types.trace import Role, Trace

_SMALL = 0.001
"""Parts below this share of the whole are summed up within their parent."""
_WIDEST = 40
"""Children of a node."""
OUTSIDE = "outside modules"
Row = tuple[tuple[str, ...], int, int]
"""Path from the root, bytes, number of storages."""


@dataclass
class Node:
    """A module, an operator, or a group of tensors alike."""

    name: str
    bytes: int = 0
    count: int = 0
    children: list[Node] = field(default_factory=list)
    share: float = 0.0
    """The share of the whole tree."""

    @property
    def size(self) -> str:
        return format_bytes(self.bytes)


def tree(rows: Iterable[Row]) -> Node:
    """The root of a tree of these paths; children stand largest first, small ones together, and a
    node with one child is one with it."""
    root = Node("")
    found: dict[tuple[str, ...], Node] = {(): root}
    for path, nbytes, count in rows:
        for depth in range(len(path) + 1):
            node = found.get(path[:depth])
            if node is None:
                node = found[path[:depth]] = Node(path[depth - 1])
                found[path[: depth - 1]].children.append(node)
            node.bytes += nbytes
            node.count += count
    _settle(root, max(root.bytes, 1))
    return root


def _settle(node: Node, whole: int) -> None:
    node.share = node.bytes / whole
    for child in node.children:
        _settle(child, whole)
    node.children.sort(key=lambda child: -child.bytes)
    kept = [c for c in node.children[:_WIDEST] if c.bytes >= _SMALL * whole]
    if rest := node.children[len(kept) :]:
        size, count = sum(c.bytes for c in rest), sum(c.count for c in rest)
        kept.append(Node(f"{len(rest)} smaller", size, count, share=size / whole))
    node.children = kept
    for position, child in enumerate(kept):
        if len(child.children) == 1 and child.children[0].children:
            (only,) = child.children
            only.name = f"{child.name}.{only.name}"
            kept[position] = only


def rows_of_trace(trace: Trace, timeline: Timeline) -> Iterator[Row]:
    """All storages alive at the peak: module by module, operator, tensors."""
    nbytes, roles = requested_bytes(trace, timeline), derive_roles(trace, timeline)
    alive = timeline.live_at(timeline.fullest_event)
    alive = alive[nbytes[alive] > 0]
    born, table, events = timeline.alloc_event[alive], trace.storages, trace.events
    at = np.maximum(born, 0)
    op = np.where(born >= 0, np.append(trace.ops.name, 0)[events.op[at]], 0)
    module = np.where(born >= 0, events.module[at], 0)
    source = np.where(born >= 0, events.source[at], 0)
    keys = (
        roles[alive],
        module,
        op,
        source,
        table.name[alive],
        table.shape[alive],
        table.dtype[alive],
    )
    groups, of = np.unique(
        np.stack([k.astype(np.int64) for k in keys], 1), axis=0, return_inverse=True
    )
    sums = np.zeros(len(groups), np.int64)
    np.add.at(sums, of.reshape(-1), nbytes[alive])
    counts = np.bincount(of.reshape(-1), minlength=len(groups))
    if before := nameless_bytes(trace, timeline.device):
        yield ("(held since before the recording)",), before, 1
    strings, owners = trace.strings, paths_below_roots(trace)
    for (role, where, made, line, *tensor), size, count in zip(
        groups.tolist(), sums.tolist(), counts.tolist(), strict=True
    ):
        name, shape, dtype = (strings[part] for part in tensor)
        path = strings[where]
        if not path and name:
            owner = name.rpartition(".")[0]
            path = owners.get(owner, owner)
        kind = CATEGORIES.get(Role(role), "").replace("_", " ")
        what = ", ".join(filter(None, (name, shape, dtype, kind, strings[line])))
        maker = short_op(strings[made]) or kind
        yield (*_components(path), maker, what), size, count


def rows_of_answer(answer: Estimate) -> Iterator[Row]:
    """What an answer says is held: module by module, role, source line."""
    for part in answer.held:
        role = part.role.replace("_", " ") or "the rest"
        path = (*_components(part.module), role, part.source or "no source line")
        yield path, part.bytes, part.count


def _components(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else (f"({OUTSIDE})",)
