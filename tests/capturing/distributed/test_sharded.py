"""Captured ranks of DDP, FSDP's first and second version in their many forms ask for what the same
ranks ask for in a real run over gloo, on the CPU, in the same order."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from memplan.capturing.session import CaptureSession
from memplan.estimation.host import host_memory
from memplan.simulate import AllocatorSettings
from tests.capturing.distributed import sharded_jobs as jobs
from tests.capturing.distributed.ranks import capture, join, options, requests, second_step
from tests.capturing.distributed.real_ranks import Sizes, run_module
from tests.capturing.distributed.test_host import only_tensors

SMALL = 64
"""Bytes: the profiler does not see all of the engine's own scalars."""
LAYER = 4 * (2 * jobs.WIDTH * jobs.HIDDEN + jobs.HIDDEN + jobs.WIDTH)
"""A whole layer, flat: gloo copies what it sends and receives, NCCL reads and writes in place."""
ROOT = {19400, 19408}
"""What is left to the root, padded to two and four ranks."""
# The CPU joins gradients by `cat` of padded copies, CUDA by a kernel.
JOINED = {2 * jobs.WIDTH * jobs.HIDDEN, 2 * jobs.HIDDEN, 2 * jobs.WIDTH}

EXTRA: dict[str, set[int]] = {
    "bucket_views": set(),
    "static_graph": set(),
    "unused_parameters": set(),
    "unsynced": set(),
    "half_hook": set(),
    "power_sgd": set(),
    "joined": set(),
    "full_shard": {LAYER, *ROOT},
    "full_shard_original": {LAYER, LAYER // 2, *ROOT, 9704},
    "shard_gradients": {LAYER, *ROOT},
    "shard_gradients_unsynced": {LAYER, *ROOT},
    "no_shard": set(),
    "hybrid_shard": {LAYER, *ROOT},
    "sharded_unsynced": {LAYER, 20176, 19968, 208},
    "sharded_half": {LAYER, LAYER // 2, 20176, 10088, 9984, 104, *JOINED},
}
OTHER_PARTS = {"full_shard_original", "sharded_half"}
"""Where rank 0 is looked at too: its parameters are others than those of rank 1."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Sizes]:
    """By world size and rank, the sizes of each job's second step."""
    return run_module("tests.capturing.distributed.sharded_jobs", tmp_path_factory.mktemp("real"))


def captured(name: str, rank: int) -> list[int]:
    """The sizes of the second step."""
    return second_step(jobs.JOBS[name], rank, jobs.SIZE, SMALL)[1]


@pytest.mark.parametrize(
    ("name", "rank"), [*((name, 1) for name in EXTRA), *((name, 0) for name in sorted(OTHER_PARTS))]
)
def test_a_rank_asks_for_what_it_really_does(
    real: dict[tuple[int, int], Sizes], name: str, rank: int
) -> None:
    ours = captured(name, rank)
    theirs = [size for size in real[jobs.SIZE, rank][name] if size > SMALL]
    rest = iter(theirs)
    assert all(size in rest for size in ours), "something is asked for that is not really"
    more = Counter(theirs) - Counter(ours)
    assert set(more) <= EXTRA[name], more


def test_power_sgd_by_hand() -> None:
    """In one bucket: two factors of rank 2 for every matrix, and what compression loses."""
    layer = [(jobs.HIDDEN, jobs.WIDTH), (jobs.WIDTH, jobs.HIDDEN)]
    sides = [*layer * jobs.LAYERS, (50, jobs.WIDTH)]
    with CaptureSession(options(1, jobs.SIZE, steps=10)) as session:
        join()
        step = jobs.power_sgd("cuda")
        step()
        trace = session.trace()
    sizes = Counter(event.bytes for event in requests(trace))
    whole = sum(4 * (rows * columns + rows) for rows, columns in sides)
    assert sizes[4 * 2 * sum(rows for rows, _ in sides)] == 1
    assert sizes[4 * 2 * sum(columns for _, columns in sides)] == 1
    assert sizes[whole] >= 2, "the bucket, and its error"


def test_offloaded_flat_parameters_are_on_the_host() -> None:
    """FSDP's first version: parameters and gradients pinned, states made like them."""
    ranks, layers, side = 4, 3, 2048
    shard = side * side * 4 // ranks

    def train() -> None:
        join()
        model = FullyShardedDataParallel(
            nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(layers))),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            cpu_offload=CPUOffload(offload_params=True),
            device_id=torch.cuda.current_device(),
        )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(2):
            model(torch.ones(8, side, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = capture(train, size=ranks)
    answer = host_memory(only_tensors(trace), AllocatorSettings())
    assert answer is not None
    assert answer.breakdown.parameters == layers * shard
    assert answer.breakdown.gradients == layers * shard
    assert 0 <= answer.breakdown.optimizer_state - 2 * layers * shard < 1024
    assert answer.pinned == 2 * layers * shard
