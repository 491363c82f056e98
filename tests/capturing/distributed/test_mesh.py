"""Captured ranks of jobs with uneven shards, on meshes of two and three dimensions, and with a
sequence or tokens that travel ask for what the same ranks ask for in a real run over gloo, on the
CPU, in the same order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_gather_single
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from memplan.capturing.session import CaptureSession
from tests.capturing.distributed import mesh_jobs
from tests.capturing.distributed.ranks import capture, join, options, requests
from tests.capturing.distributed.real_ranks import Sizes, run_module

SMALL = 64
"""Bytes: the profiler does not see all of the engine's own scalars."""
LAYER_NORM = 512
"""What the CPU's backward kernel of a layer norm takes for a moment, and CUDA's does not."""
FLAT = {49664, 100096}
"""What gloo copies for itself of a decoder's gathered root and of its layers."""
RING = {128, 512, 1024, 3200, 4096, 4352, 6400, 8192, 16384, 32768, 131072}
"""The CPU's kernel, of what it is given in parts and for itself; and gloo."""

# What is asked for beside that: by gloo, and by `chunk_cat`, which pads on the CPU alone.
EXTRA: dict[tuple[int, str], set[int]] = {
    (4, "uneven_shards"): {4 * 304 * 101, 4 * 72 * 302, 4 * 4 * 71}
    | {4 * 304 * 100, 4 * 304, 4 * 72 * 301, 4 * 72, 4 * 4 * 70},
    (4, "uneven_experts"): set(),
    (4, "grouped_experts"): set(),
    (4, "choices"): set(),
    (4, "ring_all_gather"): RING,
    (4, "ring_all_to_all"): RING - {32768, 131072},
    (8, "hybrid_and_tensor"): {LAYER_NORM} | FLAT,
    (8, "data_context_tensor"): {LAYER_NORM} | FLAT,
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Sizes]:
    """By world size and rank, the sizes of each job's second step."""
    return run_module(mesh_jobs.__name__, tmp_path_factory.mktemp("real"))


def captured(name: str, size: int, rank: int) -> list[int]:
    """The sizes of the second step."""
    with CaptureSession(options(rank, size, steps=10)) as session:
        join()
        step = mesh_jobs.JOBS[size][name]("cuda")
        step()
        start = len(session.state.recorder.builder)
        step()
        trace = session.trace()
    return [event.bytes for event in requests(trace, start) if event.bytes > SMALL]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("size", "name"), EXTRA)
def test_a_rank_asks_for_what_it_really_does(
    real: dict[tuple[int, int], Sizes], size: int, name: str, last: bool
) -> None:
    rank = size - 1 if last else 0
    ours = captured(name, size, rank)
    theirs = [nbytes for nbytes in real[size, rank][name] if nbytes > SMALL]
    rest = iter(theirs)
    assert all(nbytes in rest for nbytes in ours), "something is asked for that is not really"
    more = Counter(theirs) - Counter(ours)
    assert set(more) <= EXTRA[size, name], more


def test_a_mesh_of_another_capture_is_not_taken_for_one_s_own() -> None:
    """Rank 3's groups and parts, in a process that has captured rank 0 before."""

    def job() -> None:
        join()
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
        parts.append(tuple(mesh["data"].get_coordinate() or ()))
        whole = DTensor.from_local(torch.ones(5, 7, device="cuda"), mesh["data"], [Shard(0)])
        parts.append(tuple(whole.redistribute(placements=[Shard(1)]).to_local().shape))
        layer = nn.Linear(7, 5, device="cuda")
        fully_shard(layer, mesh=mesh["data"])
        layer(torch.ones(2, 7, device="cuda")).sum().backward()
        assert isinstance(layer.weight, DTensor)
        parts.append(tuple(layer.weight.to_local().shape))

    parts: list[Any] = []
    for rank in (0, 3):
        capture(job, rank=rank, size=4)
    assert parts == [(0,), (10, 4), (3, 7), (1,), (10, 3), (2, 7)]


def test_a_shard_moves_to_another_dimension() -> None:
    """Gloo gathers instead. NCCL: parts side by side (12 by 4 by 10 by 7), as many received, and
    put together in rows of 10 (as they lie there already, where they were rows)."""

    def job(before: int, after: int) -> list[int]:
        def run() -> None:
            join()
            mesh = init_device_mesh("cuda", (4,))
            local = torch.ones(12, 40, 7, device="cuda")
            DTensor.from_local(local, mesh, [Shard(before)]).redistribute(placements=[Shard(after)])

        trace = capture(run, size=4)
        assert trace.meta.communicators[0].collectives == ["all_to_all"]
        return [event.bytes for event in requests(trace)]

    whole = 4 * 12 * 40 * 7
    assert job(0, 1) == [whole] * 3
    assert job(1, 0) == [whole] * 3  # rows are side by side: sent as they are, then put together


def test_keys_and_values_are_gathered_for_flexible_attention() -> None:
    """Each gathered by rows of the ranks, then along the sequence; backward the same the other way
    round. Nothing of it is attention's own, whose kernel a compiler makes."""
    from torch.distributed.tensor.experimental._context_parallel import _cp_custom_ops as own

    def job() -> None:
        join()
        group = init_device_mesh("cuda", (4,)).get_group()
        keys = torch.ones(2, 4, 16, 8, device="cuda", requires_grad=True)
        gathered = own.flex_cp_allgather(keys, keys, 2, group.group_name)
        torch.autograd.backward(gathered, [torch.empty_like(item) for item in gathered])

    trace = capture(job, size=4)
    part, whole = 4 * 2 * 4 * 16 * 8, 4 * 2 * 4 * 64 * 8
    gathering = [whole, whole] * 2
    scattering = [whole, part] * 2
    sizes = [event.bytes for event in requests(trace)]
    assert sizes == [part, *gathering, whole, whole, *scattering]
    assert trace.meta.communicators[0].collectives == ["all_gather", "reduce_scatter"]


def test_a_number_is_gathered() -> None:
    def job() -> None:
        join()
        own = torch.ones((), device="cuda")
        shapes.append(tuple(all_gather_single(own, 0, init_device_mesh("cuda", (4,))).shape))

    shapes: list[tuple[int, ...]] = []
    capture(job, size=4)
    assert shapes == [(4,)]
