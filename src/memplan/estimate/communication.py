"""Memory that NCCL takes for itself, outside PyTorch's allocator: a rule for each communicator.

A connection to a peer has, for each channel, one receive buffer with room for the three protocols:
Simple 4 MiB (`NCCL_BUFFSIZE`), LL128 640 x 120 x 8 bytes for each of 8 steps, LL 512 KiB; together
9.19 MiB, which the driver rounds to 10 MiB, and 2 MiB for the sending side (NCCL's `comm.h` and
`transport/p2p.cc`; the allocations of 10,485,760 and 2,097,152 bytes are logged in NCCL issue
1685). Connections are made when an algorithm first needs them (since NCCL 2.22):

- a ring, one connection, for everything but all-to-all, gather, scatter, send and receive;
- a tree for all-reduce: one connection more at the end of a chain, two inside it;
- a connection to each peer in the node for all-to-all and its like, over more channels;
- NVLink SHARP (compute capability 9.0 and later, more than two GPUs in the node): for each channel
  twice a buffer and its 2 MiB of flags, times the GPUs in the node. Whether all-reduce uses it
  depends on the machine; the other collectives seldom do.

Held against measurements: two A100 544 MB and four 688 MB for one all-reduce group (NCCL issue 964;
here 584 and 584 MiB); eight H100 3.28 GB for the first all-to-all (issue 1685; here 2.6 GiB); the
301,989,888 bytes for each GPU that a log of NVLink SHARP shows (vLLM issue 9699), over 24 channels.
How many channels there are depends on the links between the GPUs, which a card's name does not say:
the bounds are wide.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memplan.types.trace import Communicator

_MIB = 1 << 20
_SIMPLE = 4 * _MIB
_LL128 = 640 * 120 * 8 * 8
_LL = 512 << 10
_PAGE = 2 * _MIB
_RING = frozenset({"all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "barrier"})
_TREE = frozenset({"all_reduce", "barrier"})
_TO_ALL = frozenset({"all_to_all", "gather", "scatter"})
_PAIR = frozenset({"send", "recv"})
_NVLS_CAPABILITY = (9, 0)
_NVLS_RANKS = 3


class Bounds(NamedTuple):
    """Bytes."""

    low: int
    expected: int
    high: int

    def plus(self, other: Bounds) -> Bounds:
        return Bounds(*(mine + its for mine, its in zip(self, other, strict=True)))

    def times(self, factor: int) -> Bounds:
        return Bounds(*(part * factor for part in self))


NOTHING = Bounds(0, 0, 0)
_ITSELF = Bounds(2 * _MIB, 8 * _MIB, 32 * _MIB)
"""Its description on the device, its queues of work."""


def communication_bytes(
    communicators: Iterable[Communicator], capability: tuple[int, int]
) -> Bounds:
    """What all communicators of a process hold at the end of the capture; NCCL gives nothing back
    before a group is destroyed."""
    total = NOTHING
    for communicator in communicators:
        total = total.plus(_one(communicator, capability))
    return total


def _one(communicator: Communicator, capability: tuple[int, int]) -> Bounds:
    used = frozenset(communicator.collectives)
    if communicator.ranks < 2 or not used:
        return _ITSELF
    connection = _connection_bytes(communicator)
    channels = _limited(_channels(capability), communicator)
    low = expected = high = 0
    if used & _RING:
        low, expected, high = 1, 1, 2  # the second towards the network
    if used & _TREE:
        expected, high = expected + 1, high + 2
    total = Bounds(
        low * channels.low * connection,
        expected * channels.expected * connection,
        high * channels.high * connection,
    )
    total = total.plus(_point_to_point(communicator, used, capability, connection))
    return _ITSELF.plus(total).plus(_nvls(communicator, used, capability))


def _point_to_point(
    communicator: Communicator,
    used: frozenset[str],
    capability: tuple[int, int],
    connection: int,
) -> Bounds:
    peers = 0
    if used & _TO_ALL:
        peers = communicator.local_ranks - 1 + (communicator.nodes > 1)
    elif used & _PAIR:
        peers = 1 if communicator.ranks == 2 else 2
    most = 32 if capability >= _NVLS_CAPABILITY else 16
    channels = Bounds(2, most, 32) if _linked(capability) else Bounds(1, 2, 8)
    return _limited(channels, communicator).times(peers * connection)


def _nvls(communicator: Communicator, used: frozenset[str], capability: tuple[int, int]) -> Bounds:
    local = communicator.local_ranks
    if communicator.settings.get("NCCL_NVLS_ENABLE") == "0":
        return NOTHING
    if capability < _NVLS_CAPABILITY or not _linked(capability) or local < _NVLS_RANKS:
        return NOTHING
    if not used & _RING:
        return NOTHING
    for_one = 2 * (_buffer_bytes(communicator) + _PAGE) * local
    channels = Bounds(0, 16 if used & _TREE else 0, 24)
    return _limited(channels, communicator).times(for_one)


def _linked(capability: tuple[int, int]) -> bool:
    """Whether cards of this capability are the data centre's, mostly linked by NVLink."""
    return capability in ((7, 0), (8, 0), (9, 0), (10, 0), (10, 3))


def _channels(capability: tuple[int, int]) -> Bounds:
    """Of a ring: with NVLink as many as fill it, over PCI Express a few."""
    if not _linked(capability):
        return Bounds(1, 2, 8)
    if capability == (7, 0):
        return Bounds(4, 12, 24)
    return Bounds(8, 24, 24 if capability <= _NVLS_CAPABILITY else 32)


def _limited(channels: Bounds, communicator: Communicator) -> Bounds:
    named = communicator.settings
    limit = named.get("NCCL_MAX_NCHANNELS") or named.get("NCCL_MAX_CTAS") or ""
    if not limit.isdigit() or int(limit) < 1:
        return channels
    return Bounds(*(min(part, int(limit)) for part in channels))


def _buffer_bytes(communicator: Communicator) -> int:
    size = communicator.settings.get("NCCL_BUFFSIZE", "")
    return int(size) if size.isdigit() and int(size) else _SIMPLE


def _connection_bytes(communicator: Communicator) -> int:
    receives = _buffer_bytes(communicator) + _LL128 + _LL
    return -(-receives // _PAGE) * _PAGE + _PAGE
