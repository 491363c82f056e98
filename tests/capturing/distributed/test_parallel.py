"""Captured ranks of tensor, hybrid, and pipeline parallel jobs ask for what the
same ranks ask for in a real run over gloo, on the CPU, in the same order."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch.distributed.pipelining._utils import _TensorMeta

from memplan.capturing.distributed import peers
from memplan.types.trace import Trace
from tests.capturing.distributed import parallel_jobs as jobs
from tests.capturing.distributed.ranks import second_step
from tests.capturing.distributed.real_ranks import Sizes, run_module

SMALL = 64
"""Bytes: the profiler does not see all of the engine's own scalars."""
LAYER_NORM = 8 * jobs.WIDTH
"""What the CPU's backward kernel of a layer norm takes for a moment, and CUDA's does not."""

# Beyond those: what gloo copies for itself, which NCCL reads and writes in place.
EXTRA: dict[str, set[int]] = {
    "tensor_parallel": set(),
    "sequence_parallel": {24576, 6144, 768},  # gathered and scattered parts; the CPU's own tokens
    "uneven": set(),
    "experts": set(),
    "fsdp_and_tensor": {49664, 100096},  # the flat gathered root, and a flat gathered layer
    "hybrid_shards": {49664, 198912},
    "gpipe": set(),
    "one_forward_one_backward": set(),
    "point_to_point": set(),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Sizes]:
    """By world size and rank, the sizes of each job's second step."""
    return run_module(jobs.__name__, tmp_path_factory.mktemp("real"))


@cache
def captured(name: str, rank: int) -> tuple[Trace, list[int]]:
    """The trace, and the sizes of the second step."""
    received = _TensorMeta(
        shape=torch.Size([2, jobs.TOKENS, jobs.WIDTH]),
        stride=(jobs.TOKENS * jobs.WIDTH, jobs.WIDTH, 1),
        dtype=torch.float32,
        requires_grad=True,
    )
    others = peers.current().known  # what the ranks before this one would be asked for
    others.update({f"stage {stage}": (received,) for stage in range(1, 2 * jobs.SIZE)})
    return second_step(jobs.JOBS[name], rank, jobs.SIZE, SMALL)


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("name", EXTRA)
def test_a_rank_asks_for_what_it_really_does(
    real: dict[tuple[int, int], Sizes], name: str, rank: int
) -> None:
    _, ours = captured(name, rank)
    theirs = [size for size in real[jobs.SIZE, rank][name] if size > SMALL]
    rest = iter(theirs)
    assert all(size in rest for size in ours), "something is asked for that is not really"
    more = Counter(theirs) - Counter(ours)
    assert set(more) <= EXTRA[name] | {LAYER_NORM}, more
