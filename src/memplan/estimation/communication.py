"""Memory that NCCL takes for itself, outside PyTorch's allocator: a rule for each communicator.

A connection to a peer has, for each channel, one receive buffer with room for the three protocols:
Simple 4 MiB (`NCCL_BUFFSIZE`), LL128 640 x 120 x 8 bytes for each of 8 steps, LL 512 KiB; together
9.19 MiB, which the driver rounds to 10 MiB, and 2 MiB for the sending side (NCCL's `comm.h` and
`transport/p2p.cc`; allocations of 10,485,760 and 2,097,152 bytes are logged in NCCL issue 1685).
Connections are made when an algorithm first needs them (since NCCL 2.22):

- a ring for everything but all-to-all, gather, scatter, send and receive: one connection, and one
  more towards the network where there are several nodes;
- a tree for all-reduce: one connection more at the end of a chain, two inside it;
- a connection to each peer in the node for all-to-all and its like, over more channels; 2 MiB
  more for each than a ring's, by the measurement below;
- NVLink SHARP (compute capability 9.0 and later): for each channel two buffers of 8 chunks of
  128 KiB (`NCCL_NVLS_CHUNKSIZE`), times the GPUs in the node (`ncclNvlsBufferSetup` in
  `transport/nvls.cc` of NCCL 2.28, which PyTorch 2.11 ships; until 2.20 a buffer was 6 MiB).
  Whether all-reduce uses it depends on the machine; the other collectives seldom do.

Held against measurements: two A100 544 MB and four 688 MB for one all-reduce group (NCCL issue
964; here 584 MiB, up to 896); eight H100 3.28 GB for the first all-to-all (issue 1685; here 3.1
GiB). A log of eight H100 under NCCL 2.27 or later has 24 channels for rings, 16 for NVLink SHARP
with 268,435,456 bytes (here 256 MiB) and 32 for sends. How many there are depends on the links
between the GPUs, which a card's name does not say: 24 for data centre cards on an NVSwitch (NCCL
issues 578, 1185), 16 for H800 (892), 8 between nodes (1189), 2 to 4 over PCI Express (nccl-tests
issue 307, NCCL 1706).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memplan.types.trace import Communicator

_MIB, _GIB = 1 << 20, 1 << 30
_SIMPLE = 4 * _MIB
_LL128 = 640 * 120 * 8 * 8
_LL = 512 << 10
_PAGE = 2 * _MIB
_RING = frozenset({"all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "barrier"})
_TREE = frozenset({"all_reduce", "barrier"})
_TO_ALL = frozenset({"all_to_all", "gather", "scatter"})
_PAIR = frozenset({"send", "recv"})
_HOPPER, _BLACKWELL = (9, 0), (10, 0)
_NVLS_RANKS = 3
"""NVLink SHARP is expected from so many GPUs in a node on; NCCL 2.29 uses it from two on."""
_NVLS_CHUNK, _NVLS_LARGE_CHUNK = 128 << 10, 256 << 10
_NVLS_STEPS = 8
_NETWORK_POOL = 2 * 16 * (128 << 10)
"""Bytes of the pools for sends and receives between nodes, of each channel: `sharedNetBuffersInit`
in `transport/net.cc`, 16 steps of `NCCL_P2P_NET_CHUNKSIZE`."""
_WIDE = 256 * _MIB


class Bounds(NamedTuple):
    """Bytes, or channels."""

    low: int
    expected: int
    high: int

    def plus(self, other: Bounds) -> Bounds:
        return Bounds(*(mine + its for mine, its in zip(self, other, strict=True)))

    def times(self, factor: int) -> Bounds:
        return Bounds(*(part * factor for part in self))


NOTHING = Bounds(0, 0, 0)
_ITSELF = Bounds(2 * _MIB, 8 * _MIB, 32 * _MIB)
"""The communicator itself: its description on the device and its work queues."""


def communication_bytes(
    communicators: Iterable[Communicator], capability: tuple[int, int]
) -> Bounds:
    """What all communicators of a process hold at the end of the capture; NCCL gives nothing back
    before a group is destroyed."""
    total = NOTHING
    for communicator in communicators:
        total = total.plus(_one(communicator, capability))
    return total


def communication_notes(
    communicators: Sequence[Communicator], capability: tuple[int, int]
) -> list[str]:
    """What that memory is made of, and, where its bounds are wide, why and what narrows them."""
    if not communicators:
        return []
    total = communication_bytes(communicators, capability)
    connected = [one for one in communicators if _connected(one)]
    number = f"{len(communicators)} communicator{'s' if len(communicators) > 1 else ''}"
    said = f"NCCL's own memory, outside PyTorch, is {_size(total)} by a rule: {number}"
    if not connected:
        return [f"{said} without connections."]
    each = ", each" if len(communicators) > 1 else ""
    channels = _widest([_usual_channels(one, capability) for one in connected])
    buffers = max(_usual_buffers(one) for one in connected) // _MIB
    said += f"{each} with {_range(channels)} channels, {buffers} MiB of buffers a channel and peer"
    sharp = NOTHING
    for one in connected:
        sharp = sharp.plus(_nvls(one, capability))
    if sharp.high:
        said += f"; of it for NVLink SHARP {_size(sharp)}"
    narrowing = _narrowing(connected, sharp)
    if total.high - total.low <= _WIDE or not narrowing:
        return [f"{said}."]
    return [
        f"{said}.",
        "NCCL's range is wide because the links between the GPUs, which are not known here, decide "
        f"how many channels it opens. {narrowing} bound it, in the environment here as in the "
        "job's; NCCL_DEBUG=INFO prints the channels on the machine (docs/distributed.md).",
    ]


def _narrowing(connected: list[Communicator], sharp: Bounds) -> str:
    """The settings that would narrow the bounds and are not in force."""
    used = frozenset(kind for one in connected for kind in one.collectives)
    names = ["NCCL_MAX_NCHANNELS"] if used & _RING else []
    names += ["NCCL_MAX_P2P_NCHANNELS"] if used & (_TO_ALL | _PAIR) else []
    names = [name for name in (*names, "NCCL_BUFFSIZE") if not connected[0].settings.get(name)]
    names += ["NCCL_NVLS_ENABLE=0"] if sharp.high else []
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _connected(communicator: Communicator) -> bool:
    return communicator.ranks > 1 and bool(communicator.collectives)


def _one(communicator: Communicator, capability: tuple[int, int]) -> Bounds:
    if not _connected(communicator):
        return _ITSELF
    used = frozenset(communicator.collectives)
    connection = _connection_bytes(communicator)
    channels = _ring_channels(communicator, capability)
    low = expected = high = 0
    if used & _RING:
        low, expected, high = 1, 1, 1 if communicator.nodes == 1 else 2
    if used & _TREE:
        expected, high = expected + 1, high + 2
    total = Bounds(
        low * channels.low * connection,
        expected * channels.expected * connection,
        high * channels.high * connection,
    )
    pairs, peers = _pair_channels(communicator, capability), _peers(communicator)
    total = total.plus(pairs.times(peers * (connection + _PAGE)))
    if peers and communicator.nodes > 1:
        total = total.plus(pairs.times(_NETWORK_POOL))
    return _ITSELF.plus(total).plus(_nvls(communicator, capability))


def _peers(communicator: Communicator) -> int:
    """The number of ranks to which it sends or from which it receives directly."""
    used = frozenset(communicator.collectives)
    if used & _TO_ALL:
        return communicator.local_ranks - 1 + (communicator.nodes > 1)
    if used & _PAIR:  # traces of earlier captures do not say to whom
        return communicator.peers or min(communicator.ranks - 1, 2)
    return 0


def _pair_channels(communicator: Communicator, capability: tuple[int, int]) -> Bounds:
    """Channels for sends and receives. `NCCL_MAX_NCHANNELS` does not bound them (NCCL issue
    1598)."""
    most = 32 if capability >= _HOPPER else 16
    channels = Bounds(2, most, 32) if _linked(capability) else Bounds(1, 2, 8)
    return _limited(channels, communicator, "NCCL_MAX_P2P_NCHANNELS")


def _usual_channels(communicator: Communicator, capability: tuple[int, int]) -> Bounds:
    """The number of channels for the collective that it runs most."""
    if not frozenset(communicator.collectives) & _RING:
        return _pair_channels(communicator, capability)
    return _ring_channels(communicator, capability)


def _usual_buffers(communicator: Communicator) -> int:
    ring = frozenset(communicator.collectives) & _RING
    return _connection_bytes(communicator) + (0 if ring else _PAGE)


def _ring_channels(communicator: Communicator, capability: tuple[int, int]) -> Bounds:
    names = ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
    return _limited(_channels(capability), communicator, *names)


def _nvls(communicator: Communicator, capability: tuple[int, int]) -> Bounds:
    local, named = communicator.local_ranks, communicator.settings
    used = frozenset(communicator.collectives)
    if named.get("NCCL_NVLS_ENABLE") == "0" or not used & _RING:
        return NOTHING
    if capability < _HOPPER or not _linked(capability) or local < 2:
        return NOTHING
    blackwell = capability >= _BLACKWELL
    expected = (24 if blackwell else 16) if used & _TREE and local >= _NVLS_RANKS else 0
    limits = ("NCCL_NVLS_NCHANNELS", "NCCL_MAX_CTAS")
    channels = _limited(Bounds(0, expected, 32 if blackwell else 24), communicator, *limits)
    chunk = _number(communicator, "NCCL_NVLS_CHUNKSIZE")
    usual = chunk or _NVLS_CHUNK
    largest = chunk or (_NVLS_LARGE_CHUNK if blackwell and communicator.nodes > 1 else _NVLS_CHUNK)
    buffers = 2 * _NVLS_STEPS * local
    return Bounds(0, channels.expected * buffers * usual, channels.high * buffers * largest)


def _linked(capability: tuple[int, int]) -> bool:
    """Whether cards of this capability are the data centre's, mostly linked by NVLink."""
    return capability in ((7, 0), (8, 0), (9, 0), (10, 0), (10, 3))


def _channels(capability: tuple[int, int]) -> Bounds:
    """The number of channels of a ring: with NVLink as many as fill it, over PCI Express a few."""
    if not _linked(capability):
        return Bounds(1, 2, 8)
    if capability == (7, 0):
        return Bounds(2, 12, 24)
    return Bounds(2, 24, 32 if capability >= _BLACKWELL else 24)


def _limited(channels: Bounds, communicator: Communicator, *names: str) -> Bounds:
    limits = [limit for name in names if (limit := _number(communicator, name))]
    return Bounds(*(min(part, *limits) for part in channels)) if limits else channels


def _number(communicator: Communicator, name: str) -> int:
    """A setting that is a number from 1 on; 0 where it is none."""
    text = communicator.settings.get(name, "")
    return int(text) if text.isdigit() else 0


def _connection_bytes(communicator: Communicator) -> int:
    receives = (_number(communicator, "NCCL_BUFFSIZE") or _SIMPLE) + _LL128 + _LL
    return -(-receives // _PAGE) * _PAGE + _PAGE


def _widest(found: list[Bounds]) -> Bounds:
    lows, expected, highs = zip(*found, strict=True)
    return Bounds(min(lows), max(expected), max(highs))


def _size(size: Bounds) -> str:
    low, expected, high = size
    if high < _GIB:
        return f"{expected // _MIB} MiB ({low // _MIB}-{high // _MIB})"
    return f"{expected / _GIB:.1f} GiB ({low / _GIB:.1f}-{high / _GIB:.1f})"


def _range(channels: Bounds) -> str:
    low, expected, high = channels
    return f"{expected}" if low == high else f"{expected} ({low}-{high})"
