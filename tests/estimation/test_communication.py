"""NCCL's own memory, against sums by hand and published measurements."""

from __future__ import annotations

import pytest

from memplan.estimation.communication import communication_bytes, communication_notes
from memplan.types.trace import Communicator

MIB = 1 << 20
A100, H100, B200, RTX4090 = (8, 0), (9, 0), (10, 0), (8, 9)


def group(
    kinds: str, ranks: int = 8, local: int = 8, nodes: int = 1, peers: int = 0, **settings: str
) -> Communicator:
    return Communicator(
        ranks, local, nodes, collectives=kinds.split(), peers=peers, settings=settings
    )


def test_a_ring_has_a_receive_buffer_and_a_page_for_each_channel() -> None:
    found = communication_bytes([group("all_gather reduce_scatter", 2, 2)], A100)
    assert found.expected == (8 + 24 * 12) * MIB
    assert found.high == (32 + 24 * 12) * MIB  # within a node there is one neighbour to hear from
    between = communication_bytes([group("all_gather", 16, 8, 2)], A100)
    assert between.high == (32 + 2 * 24 * 12) * MIB


@pytest.mark.parametrize(
    ("kinds", "ranks", "capability", "measured"),
    [
        # NCCL issue 964, one all-reduce; its first figure is of two GPUs, the second of four.
        ("all_reduce", 2, A100, 544 * MIB),
        ("all_reduce", 4, A100, 688 * MIB),
        # NCCL issue 1685: 1.06 GB before and 4.34 GB after the first all-to-all.
        ("all_to_all", 8, H100, 3_280_000_000),
    ],
)
def test_published_measurements_are_within(
    kinds: str, ranks: int, capability: tuple[int, int], measured: int
) -> None:
    low, expected, high = communication_bytes([group(kinds, ranks, ranks)], capability)
    assert low <= measured <= high
    assert abs(expected / measured - 1) < 0.2


def test_nvlink_sharp_is_what_nccl_logs() -> None:
    """`nvlsTotalSize 268435456` of eight H100, 16 channels."""
    without = communication_bytes([group("all_reduce", NCCL_NVLS_ENABLE="0")], H100)
    with_it = communication_bytes([group("all_reduce")], H100)
    assert with_it.expected - without.expected == 268_435_456
    assert with_it.low == without.low
    assert communication_bytes([group("all_reduce")], A100) == without
    half = communication_bytes([group("all_reduce", NCCL_NVLS_CHUNKSIZE="65536")], H100)
    assert half.expected - without.expected == 268_435_456 // 2


def test_settings_bound_what_they_are_about() -> None:
    free = communication_bytes([group("all_reduce")], A100)
    few = communication_bytes([group("all_reduce", NCCL_MAX_NCHANNELS="2")], A100)
    assert few.expected == (8 + 2 * 2 * 12) * MIB < free.expected
    small = communication_bytes([group("all_reduce", NCCL_BUFFSIZE=str(MIB))], A100)
    assert small.expected == (8 + 2 * 24 * 10) * MIB
    # Sends and receives have a bound of their own.
    pairs = communication_bytes([group("send recv", peers=1)], A100)
    assert communication_bytes([group("send recv", peers=1, NCCL_MAX_NCHANNELS="1")], A100) == pairs
    fewer = communication_bytes([group("send", peers=1, NCCL_MAX_P2P_NCHANNELS="1")], A100)
    assert fewer.expected == (8 + 14) * MIB
    nonsense = group("all_reduce", NCCL_MAX_NCHANNELS="many", NCCL_BUFFSIZE="0")
    assert communication_bytes([nonsense], A100) == free


def test_each_peer_has_connections() -> None:
    one, two = (communication_bytes([group("send", peers=n)], A100) for n in (1, 2))
    assert two.expected - one.expected == 16 * 14 * MIB
    far = communication_bytes([group("send", 16, 8, 2, peers=1)], A100)
    assert far.expected - one.expected == 16 * 2 * 16 * (128 << 10)  # the network's pools


def test_alone_or_unused_it_is_small() -> None:
    for one in (group("all_reduce", 1, 1), group("")):
        assert communication_bytes([one], H100) == (2 * MIB, 8 * MIB, 32 * MIB)
    assert communication_bytes([], H100) == (0, 0, 0)


@pytest.mark.parametrize("capability", [A100, H100, B200, RTX4090, (7, 0), (12, 0)])
@pytest.mark.parametrize("kinds", ["all_reduce", "all_gather", "all_to_all", "send", "barrier"])
@pytest.mark.parametrize("nodes", [1, 4])
def test_bounds_are_in_order(kinds: str, capability: tuple[int, int], nodes: int) -> None:
    low, expected, high = communication_bytes([group(kinds, 8 * nodes, 8, nodes)], capability)
    assert 0 < low <= expected <= high < 8 << 30


def test_the_note_says_what_it_is_made_of_why_it_is_wide_and_what_narrows_it() -> None:
    made, wide = communication_notes([group("all_reduce")], H100)
    assert made == (
        "NCCL's own memory, outside PyTorch, is 0.8 GiB (0.0-1.2) by a rule: 1 communicator with "
        "24 (2-24) channels, 12 MiB of buffers a channel and peer; of it for NVLink SHARP 256 MiB "
        "(0-384)."
    )
    assert "links between the GPUs" in wide
    for setting in ("NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE", "NCCL_NVLS_ENABLE=0", "NCCL_DEBUG=INFO"):
        assert setting in wide


def test_the_note_is_short_where_the_range_is_narrow() -> None:
    bounded = [group("all_reduce", 2, 2, NCCL_MAX_NCHANNELS="2")] * 2
    (made,) = communication_notes(bounded, A100)
    assert "2 communicators, each with 2 channels" in made
    assert communication_notes([group("")], H100) == [
        "NCCL's own memory, outside PyTorch, is 8 MiB (2-32) by a rule: 1 communicator without "
        "connections."
    ]
    assert communication_notes([], H100) == []
