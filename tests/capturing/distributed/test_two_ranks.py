"""Captured ranks of models under FSDP2 and DDP, eager and compiled, ask for what the same ranks ask
for in a real run over gloo, on the CPU, in the same order."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.capturing.distributed import two_rank_jobs as jobs
from tests.capturing.distributed.ranks import second_step
from tests.capturing.distributed.real_ranks import Sizes, run_module
from tests.capturing.distributed.test_sharded import JOINED, LAYER, SMALL

EXTRA: dict[str, set[int]] = {
    "checkpointed_blocks": {LAYER, LAYER // 2, *JOINED},
    "replicated_inside": set(),
    "replicated_outside": set(),
}
"""What the CPU and gloo ask for besides: see `test_sharded`."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Sizes]:
    """By world size and rank, the sizes of each job's second step."""
    return run_module(jobs.__name__, tmp_path_factory.mktemp("real"))


def captured(name: str, rank: int) -> list[int]:
    """The sizes of the second step."""
    torch._dynamo.reset()
    trace, sizes = second_step(jobs.JOBS[name], rank, jobs.SIZE, SMALL)
    assert not trace.meta.assumptions
    return sizes


@pytest.mark.parametrize("name", EXTRA)
def test_a_compiled_rank_asks_for_what_it_really_does(
    real: dict[tuple[int, int], Sizes], name: str
) -> None:
    ours = captured(name, 1)
    theirs = [size for size in real[jobs.SIZE, 1][name] if size > SMALL]
    rest = iter(theirs)
    assert all(size in rest for size in ours), "something is asked for that is not really"
    more = Counter(theirs) - Counter(ours)
    assert set(more) <= EXTRA[name], more


@pytest.mark.parametrize("rank", range(jobs.SIZE))
def test_a_replica_asks_for_what_it_really_does(
    real: dict[tuple[int, int], Sizes], rank: int
) -> None:
    assert captured("ddp", rank) == [n for n in real[jobs.SIZE, rank]["ddp"] if n > SMALL]


@pytest.mark.parametrize("rank", range(jobs.SIZE))
def test_an_uneven_shard_asks_for_what_it_really_does(
    real: dict[tuple[int, int], Sizes], rank: int
) -> None:
    """Gloo copies what it sends and receives, in buffers of its own; and where the ranks do not
    divide a dimension (301), the CPU's `chunk_cat` pads in memory, CUDA's kernel does not."""
    gathered = {4 * 2 * 151 * 101, 4 * 2 * 35 * 302}
    scattered = {4 * 151 * 101, 4 * 35 * 302}
    padded = {4 * 302 * 100, 4 * 302}
    ours = Counter(captured("fsdp2", rank))
    theirs = Counter(n for n in real[jobs.SIZE, rank]["fsdp2"] if n > SMALL)
    extra = theirs - ours
    assert not ours - theirs
    assert set(extra) <= gathered | scattered | padded
    assert all(extra[size] == 1 for size in padded)
