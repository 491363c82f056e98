"""How long collectives take: ring algorithms over the links that the group spans.

A ring moves `(n - 1) / n` of the data through every rank's link, an all-reduce twice that (NVIDIA:
nccl-tests, "Performance reported by NCCL tests"). Within a node the link is NVLink, or PCI Express
where the card has none; a ring over several nodes enters and leaves a node through all of its
network adapters, one for each of its GPUs in the group.
"""

from __future__ import annotations

import math

from memplan.timing.classes import short
from memplan.timing.operands import parsed
from memplan.timing.table import Links
from memplan.types.device import DeviceProfile

_KINDS = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "barrier"),
    *("gather", "scatter", "reduce", "send", "recv"),
)
"""Kinds of collectives as they are written. A name that contains another one comes before it."""
_PREFIXES = ("c10d.", "_c10d_functional.", "symm_mem.")


def is_collective(name: str) -> bool:
    return name.startswith(_PREFIXES)


def span(text: str) -> tuple[int, int]:
    """Ranks of a collective's group, and how many of them are in the rank's node, by the text of
    its operands; (1, 1) where that is not known."""
    arguments = parsed(text)
    if not arguments or not isinstance(arguments[0], tuple) or len(arguments[0]) != 2:
        return 1, 1
    ranks, local = arguments[0]
    return ranks, max(local, 1)


def nodes_of(ranks: int, local: int) -> int:
    """Nodes that a group lies on, each with as many of its ranks."""
    return -(-ranks // local)


def collective_seconds(
    name: str, text: str, moved: int, profile: DeviceProfile, links: Links
) -> float:
    """Seconds of a collective. `text` says how many ranks its group has and how many of them are
    in the rank's node; without it, or among one rank, it takes no time. `moved`: bytes of what goes
    in and what comes out of it."""
    ranks, local = span(text)
    if ranks < 2:
        return 0.0
    nodes = nodes_of(ranks, local)
    latency = links.latency_us * 1e-6 * (1 + math.log2(nodes))
    bandwidth = _bandwidth(nodes, local, profile) * links.efficiency
    kind = collective_kind(name)
    return latency + _ring_share(kind, ranks) * message_bytes(kind, moved, ranks) / bandwidth


def _bandwidth(nodes: int, local: int, profile: DeviceProfile) -> float:
    within = profile.nvlink_bytes_per_second or profile.host_link_bytes_per_second
    if nodes == 1:
        return within
    across = profile.network_bytes_per_second * max(local, 1)
    return min(within, across) if local > 1 else across


def collective_kind(name: str) -> str:
    """`all-gather` of `c10d._allgather_base_.default`; what has no name below keeps its own."""
    plain = short(name).replace("_", "")
    return next((kind for kind in _KINDS if kind.replace("-", "") in plain), short(name))


def message_bytes(kind: str, moved: int, ranks: int) -> float:
    """Bytes of the data as nccl-tests counts them: of all ranks where it is gathered or scattered,
    else of one. `moved`: bytes of what goes in and what comes out."""
    if kind in ("all-gather", "reduce-scatter", "gather", "scatter"):
        return moved * ranks / (ranks + 1)
    return moved / 2


def _ring_share(kind: str, ranks: int) -> float:
    """The share of the message that passes the busiest link of a ring."""
    share = (ranks - 1) / ranks
    if kind == "all-reduce":
        return 2 * share
    return share if "gather" in kind or "scatter" in kind or kind == "all-to-all" else 1.0
